"""Configuration that is stored in a checkpoint. Does not import torch."""

import ast
import hashlib
import inspect
import math
import textwrap
from collections.abc import Collection, Mapping
from typing import Any

import yaml

from rankzero.distributed.process.user_traceback import is_user_file
from rankzero.runs.secrets import without_secrets

Config = dict[str, Any]
"""Maps each section (`model`, `data`, `trainer`) or flag to its value, as `--config` reads it from YAML."""


class _Dumper(yaml.SafeDumper):
    """YAML dumper that writes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def dump_config(config: Config) -> str:
    """Returns the configuration as YAML, for `--config`."""
    return str(yaml.dump(config, Dumper=_Dumper, sort_keys=False))


def as_json(value: Any) -> Any:
    """Returns a configuration value for JSON: keys become strings, and non-finite numbers YAML's words for them."""
    if isinstance(value, dict):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def read_config(text: str) -> Config:
    """Returns the configuration in a file of YAML; {} if the file is damaged."""
    try:
        content = as_json(yaml.safe_load(text))
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def config_in(manifest: Mapping[str, Any]) -> Config:
    """Returns the configuration in the manifest of a checkpoint; {} if there is none."""
    config = (manifest.get("rankzero") or {}).get("config")
    return config if isinstance(config, dict) else {}


def classes_in(config: Config) -> dict[str, str]:
    """Returns the class paths of `model` and `data` in a configuration."""
    return {name: str(config[name]["class_path"]) for name in ("model", "data") if config.get(name)}


CONSTANTS = "constants"
"""Section of a script's configuration: global numbers that the user's classes read; ranks may have different ones."""

_SECTIONS = ("model", "data", "hyperparameters", CONSTANTS, "code")
_TRAINING = (
    *("seed", "seed_everything", "batch_size", "global_batch_size"),
    *("accumulate_grad_batches", "gradient_clip_val", "precision"),
)
_LOADING = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor", "timeout", "in_order")
_LIMITS = {"limit_train_batches": (None, 1.0), "overfit_batches": (None, 0, 0.0), "fast_dev_run": (None, False, 0)}
"""Trainer argument that limits the data of training -> its values without a limit."""


def decides_results(key: str) -> bool:
    """Whether a setting, by its key of `flattened`, decides what a run trains, and not only how or how long."""
    name = key.rpartition(".")[2]
    return name in (*_TRAINING, *_LIMITS) or (key.partition(".")[0] in _SECTIONS and name not in _LOADING)


def data_limits(config: Config) -> dict[str, str]:
    """Returns the arguments of a configuration that limit the data of training; 1 batch differs from 1.0, all of it."""
    values = {key.rpartition(".")[2]: repr(value) for key, value in flattened(as_json(config)).items()}
    limited = [name for name, defaults in _LIMITS.items() if values.get(name, "None") not in map(repr, defaults)]
    return {name: values[name] for name in limited}


def changed_settings(stored: Config, current: Config, only_results: bool = False) -> list[str]:
    """Returns changed settings, or only those that `decides_results`, as `--flag before -> now`; hides secrets."""
    stored_values, current_values = flattened(stored), flattened(as_json(current))
    shown_before, shown_now = without_secrets(stored_values), without_secrets(current_values)
    return [
        "the code of the model" if key == "code" else f"--{key} {shown_before.get(key)} -> {shown_now.get(key)}"
        for key in {**stored_values, **current_values}
        if stored_values.get(key) != current_values.get(key) and (not only_results or decides_results(key))
    ]


def flattened(content: Any, prefix: str = "") -> dict[str, Any]:
    """Flattens a nested configuration to `a.b.c` -> value; without the level `init_args`."""
    if not isinstance(content, dict) or not content:
        return {prefix.removesuffix("."): content}
    return {
        path: value
        for key, item in content.items()
        if not (key == "init_args" and not item)  # its key would be that of the class
        for path, value in flattened(item, prefix if key == "init_args" else f"{prefix}{key}.").items()
    }


SINGLE_START_ARGUMENTS = (
    *("name", "mirror", "resume", "accept_changed", "trust_checkpoint", "preflight"),
    *("node_rank", "master_addr", "master_port", "interface", "auth", "quiet"),
)
"""Arguments that apply to one start only and are not stored for other runs."""


def describe_config(
    model: object, data: object, arguments: Mapping[str, Any], left_out: Collection[str] = ()
) -> Config:
    """Returns the configuration of a run that a script has built, as far as YAML can represent it.

    The data may be loaders, of which only the hyperparameters are stored, such as `batch_size`. A finder chooses the
    hyperparameters in `left_out`.
    """
    config: Config = {"model": {"class_path": _class_path(model)}}
    if hasattr(data, "train_dataloader"):
        config["data"] = {"class_path": _class_path(data)}
    plain = {
        name: value for name, value in arguments.items() if name not in SINGLE_START_ARGUMENTS and _is_plain(value)
    }
    hyperparameters = {name: _hyperparameters(owner, left_out) for name, owner in (("model", model), ("data", data))}
    functions = _user_functions(model)
    named = [(name, function.__globals__.get(name)) for function in functions for name in function.__code__.co_names]
    constants = {name: value for name, value in named if type(value) in (int, float, bool)}
    digest = hashlib.sha256("\n".join(map(_source, functions)).encode()).hexdigest()[:12]
    described = {"hyperparameters": hyperparameters, CONSTANTS: constants, "code": digest}
    return {**config, "trainer": plain, **described}


def _hyperparameters(instance: object, left_out: Collection[str]) -> dict[str, Any]:
    """Returns saved hyperparameters, and attributes that are named like arguments of the class, if they are plain.

    Returns those of each loader for a collection of loaders.
    """
    instance = getattr(instance, "iterables", instance)  # of a CombinedLoader
    if isinstance(instance, Mapping | list | tuple):
        items = instance.items() if isinstance(instance, Mapping) else enumerate(instance)
        found = {str(key): _hyperparameters(item, left_out) for key, item in items}
        return {key: values for key, values in found.items() if values}
    attributes = getattr(instance, "__dict__", {})
    parameters = inspect.signature(type(instance).__init__).parameters if attributes else {}
    values = {name: value for name, value in attributes.items() if name in parameters}
    values |= dict(getattr(instance, "hparams", {}))
    return {name: value for name, value in values.items() if name not in left_out and _is_plain(value)}


def _user_functions(model: Any) -> list[Any]:
    """Returns the functions of the user's classes in a model."""
    modules = model.modules() if hasattr(model, "modules") else [model]
    kinds = dict.fromkeys(kind for module in modules for kind in type(module).__mro__)
    functions = [inspect.unwrap(item) for kind in kinds for item in vars(kind).values() if inspect.isfunction(item)]
    return [function for function in functions if is_user_file(function.__code__.co_filename)]


def _source(function: Any) -> str:
    """Returns the code of a function as a text that does not depend on comments and line breaks."""
    try:
        return ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(function))))
    except (OSError, SyntaxError):  # without a file, or a lambda within an expression
        return str(function.__code__.co_code.hex())


def _class_path(instance: object) -> str:
    return f"{type(instance).__module__}.{type(instance).__qualname__}"


def _is_plain(value: object) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or type(value) in (str, int, float, bool)


def without_objects(config: Config) -> Config:
    """Returns a dumped configuration without arguments whose defaults are objects that YAML cannot represent.

    jsonargparse (4.52) writes an error message in place of such an object. A later run or an evaluation with this
    configuration uses the same default.
    """
    return {
        key: without_objects(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if not (isinstance(value, str) and value.startswith("Unable to serialize instance "))
    }
