"""The configuration that a checkpoint remembers, as YAML. Imports no torch."""

from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """Knows no aliases, of which a few lines can make what fills the memory."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("an alias")
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Writes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def dump_config(config: dict[str, Any]) -> str:
    """The text that `read_config` reads."""
    return str(yaml.dump(config, Dumper=_Dumper, sort_keys=False))


def read_config(text: Any) -> dict[str, Any]:
    """Reads a configuration; empty where somebody wrote it who means ill, or knows no better."""
    try:
        content = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, AttributeError, LookupError, TypeError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def classes_in(config: str) -> dict[str, str]:
    """The class paths of model and data in a configuration; empty where it does not name them."""
    content = read_config(config)
    try:
        return {name: str(content[name]["class_path"]) for name in ("model", "data") if content.get(name)}
    except (LookupError, TypeError):
        return {}


def changes(before: str, now: str) -> list[str]:
    """What is asked for otherwise than a checkpoint remembers, in a line of `--flag before -> now`; none if nothing."""
    was, asked = (flattened(read_config(text)) for text in (before, now))
    changed = [
        f"--{key} {was.get(key)} -> {asked.get(key)}" for key in {**was, **asked} if was.get(key) != asked.get(key)
    ]
    return [f"changed since the checkpoint: {', '.join(changed)}"] if changed else []


def flattened(content: Any, prefix: str = "") -> dict[str, Any]:
    """A nested configuration as `a.b.c` -> value."""
    if not isinstance(content, dict) or not content:
        return {prefix.removesuffix("."): content}
    return {
        path: value
        for key, part in content.items()
        for path, value in flattened(part, prefix if key == "init_args" else f"{prefix}{key}.").items()
    }


def without_objects(config: dict[str, Any]) -> dict[str, Any]:
    """A dumped configuration without the arguments whose defaults are objects that YAML cannot hold.

    jsonargparse (4.52) puts an error message in the place of such an object. Another run like this one, and an
    evaluation, build it from the same default.
    """
    return {
        key: without_objects(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if not (isinstance(value, str) and value.startswith("Unable to serialize instance "))
    }
