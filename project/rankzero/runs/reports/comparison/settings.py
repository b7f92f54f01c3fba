"""Settings in which runs differ. Does not import torch."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from rankzero.runs.reports.secrets import without_secrets
from rankzero.runs.reports.text import MISSING
from rankzero.runs.stored_config import SINGLE_START_ARGUMENTS, Config, flattened

_IGNORED = frozenset({*SINGLE_START_ARGUMENTS, "root", "start_timeout", "launcher", "requeue", "max_attempts"})
"""Settings that change where and how a run is started, and not what it computes."""

_ABSENT = object()


class Difference(NamedTuple):
    """A setting in which runs differ.

    Args:
        name: Its name, as on the command line without dashes.
        values: Its value in each run, as text; secret values are hidden.
    """

    name: str
    values: Sequence[str]


def differences(configs: Sequence[Config]) -> list[Difference] | None:
    """Returns the settings in which runs differ; None if fewer than two configurations are known.

    Args:
        configs: Configuration of each run; {} if it is not known, which is no difference.
    """
    flat = [_flat(config) for config in configs]
    known = [settings for settings, config in zip(flat, configs, strict=True) if config]
    if len(known) < 2:
        return None
    shown = [without_secrets(settings) for settings in flat]
    names = dict.fromkeys(name for settings in known for name in settings)
    found = []
    for name in names:
        values = [settings.get(name) for settings in known]  # null and absent are equal
        if any(_differs(value, values[0]) for value in values[1:]):
            found.append(Difference(name, [_text(settings.get(name, _ABSENT)) for settings in shown]))
    return found


def _flat(config: Config) -> dict[str, Any]:
    """Returns the settings by name. The class of an object has the name of the object: `model` -> `MLP`."""
    return {
        name.removesuffix(".class_path"): value
        for name, value in flattened(_with_indices(config)).items()
        if name.removeprefix("trainer.") not in _IGNORED
    }


def _with_indices(value: Any) -> Any:
    """Replaces lists of lists or dictionaries by dictionaries from index to item, so that items are compared."""
    if isinstance(value, dict):
        return {key: _with_indices(item) for key, item in value.items()}
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        return {str(index): _with_indices(item) for index, item in enumerate(value)}
    return value


def _differs(value: Any, other: Any) -> bool:
    return value != other or isinstance(value, bool) != isinstance(other, bool)


def _text(value: Any) -> str:
    if value is _ABSENT:
        return MISSING
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
