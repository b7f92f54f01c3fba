"""The configuration that a checkpoint remembers, as YAML. Imports no torch."""

from collections.abc import Mapping
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


OF_ONE_START = (
    *("name", "resume", "accept_changed", "trust_checkpoint"),
    *("node_rank", "master_addr", "master_port", "interface"),
)
"""Arguments that another run like this one does not take over."""


def describe_config(model: object, data: object, arguments: Mapping[str, Any]) -> str:
    """The configuration of a run that a script has built, as far as YAML can hold it.

    Args:
        model: The LightningModule.
        data: The data module; None, or loaders, which are not described.
        arguments: The Trainer's arguments that were given.
    """
    config: dict[str, Any] = {"model": {"class_path": _class_path(model)}}
    if hasattr(data, "train_dataloader"):
        config["data"] = {"class_path": _class_path(data)}
    plain = {name: value for name, value in arguments.items() if name not in OF_ONE_START and _is_plain(value)}
    return dump_config({**config, "trainer": plain})


def _class_path(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _is_plain(value: object) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or type(value) in (str, int, float, bool)


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
