"""The configuration that a checkpoint stores. Imports no torch."""

import math
from collections.abc import Mapping
from typing import Any

import yaml

Config = dict[str, Any]
"""Section (`model`, `data`, `trainer`) or flag -> its value, as `--config` reads it from YAML."""


MAX_DEPTH = 100


class _Loader(yaml.SafeLoader):
    """Refuses aliases: a few lines of them can expand to more than the memory holds."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("an alias")
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Writes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def dump_config(config: Config) -> str:
    """The configuration as YAML, for `--config`."""
    return str(yaml.dump(config, Dumper=_Dumper, sort_keys=False))


def as_json(value: Any, depth: int = 0) -> Any:
    """A value of a configuration as JSON holds it: numbers that are not finite as YAML spells them, keys as text.

    Raises:
        ValueError: It is nested more than `MAX_DEPTH` times.
    """
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    if isinstance(value, dict):
        return {str(key): as_json(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [as_json(item, depth + 1) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def read_config(stored: Any) -> Config:
    """The configuration that a manifest holds: an object or, from versions before 0.2, YAML. Empty if it is neither."""
    try:
        content = as_json(yaml.load(stored, Loader=_Loader) if isinstance(stored, str) else stored)
    except (yaml.YAMLError, AttributeError, LookupError, TypeError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def classes_in(config: Config) -> dict[str, str]:
    """The class paths of model and data in a configuration; empty where it does not name them."""
    try:
        return {name: str(config[name]["class_path"]) for name in ("model", "data") if config.get(name)}
    except (LookupError, TypeError):
        return {}


def changes(before: Config, now: Config) -> list[str]:
    """What differs from the configuration of a checkpoint, in a line of `--flag before -> now`; empty if nothing.

    Args:
        before: As `read_config` returns it.
        now: The configuration of this start.
    """
    was, asked = flattened(before), flattened(as_json(now))
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


def describe_config(model: object, data: object, arguments: Mapping[str, Any]) -> Config:
    """The configuration of a run that a script has built, as far as YAML can hold it.

    Args:
        model: The LightningModule.
        data: The data module; None, or loaders, which are not described.
        arguments: The Trainer's arguments that were given.
    """
    config: Config = {"model": {"class_path": _class_path(model)}}
    if hasattr(data, "train_dataloader"):
        config["data"] = {"class_path": _class_path(data)}
    plain = {name: value for name, value in arguments.items() if name not in OF_ONE_START and _is_plain(value)}
    return {**config, "trainer": plain}


def _class_path(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _is_plain(value: object) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or type(value) in (str, int, float, bool)


def without_objects(config: Config) -> Config:
    """A dumped configuration without the arguments whose defaults are objects that YAML cannot hold.

    jsonargparse (4.52) puts an error message in the place of such an object. Another run like this one, and an
    evaluation, build it from the same default.
    """
    return {
        key: without_objects(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if not (isinstance(value, str) and value.startswith("Unable to serialize instance "))
    }
