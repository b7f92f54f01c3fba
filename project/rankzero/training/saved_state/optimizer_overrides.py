"""Gives changed settings of optimizers and schedules precedence over the settings in a checkpoint.

A state dict of torch contains settings (learning rate, momentum) in addition to progress, so loading it restores the
old settings. Here, a checkpoint also records the settings as configured. If a setting is configured differently in a
resumed run, the new value replaces the restored one.
"""

from contextlib import suppress
from itertools import chain
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from rankzero.distributed.torch_inside import set_last_rates
from rankzero.messages import few, print_line
from rankzero.training.hooks import LoopCallback

Settings = dict[str, Any]

_PROGRESS = ("last_epoch", "_step_count", "_last_lr", "best", "num_bad_epochs", "cooldown_counter", "lr")


class OptimizerOverrides(LoopCallback):
    """Saves the configured settings of optimizers and schedules, and applies changed ones after a resume."""

    def __init__(self) -> None:
        self._group_settings: list[list[Settings]] = []
        self._schedules: list[Any] = []
        self._schedule_settings: list[Settings] = []
        self._current: dict[str, list[Any]] = {}
        self._saved: dict[str, list[Any]] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._saved = None

    def on_configured(self, trainer: Trainer) -> None:
        self._group_settings = [
            [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
            for optimizer in trainer.optimizers
        ]
        self._schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
        self._schedule_settings = [schedule.state_dict() for schedule in self._schedules]
        self._current = {
            "optimizers": [[_plain(group) for group in groups] for groups in self._group_settings],
            "schedules": [_plain(schedule) for schedule in self._schedule_settings],
        }

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["configured"] = self._current

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._saved = checkpoint.get("configured")

    def on_ready(self, trainer: Trainer) -> None:
        saved, self._saved = self._saved, None
        if not saved:
            return
        for optimizer, *settings in zip(trainer.optimizers, saved["optimizers"], self._group_settings, strict=False):
            for group, old, new in zip(optimizer.param_groups, *settings, strict=False):
                _change_group(group, old, new)
        for schedule, old, new in zip(self._schedules, saved["schedules"], self._schedule_settings, strict=False):
            _change_schedule(schedule, old, new)
        named = [
            f"{key} {old[key]} -> {value}"
            for old, new in zip(_all_settings(saved), _all_settings(self._current), strict=False)
            for key, value in new.items()
            if key in (*_changed(old, new), "lr") and key != "initial_lr" and old.get(key, value) != value
        ]
        if named and trainer.is_global_zero:
            print_line(f"rankzero: changed in optimizers and schedules: {few(list(dict.fromkeys(named)))}")


def _all_settings(configured: dict[str, list[Any]]) -> list[Settings]:
    return [*chain(*configured["optimizers"]), *configured["schedules"]]


def _change_group(group: Settings, saved: Settings, current: Settings) -> None:
    group.update({key: current[key] for key in _changed(saved, _plain(current))})
    # A schedule has changed the rate since then, so the current rate is scaled by the ratio of the configured rates.
    before, after = (settings.get("initial_lr", settings.get("lr")) for settings in (saved, current))
    if before != after and before and after is not None:
        group["lr"] = group["lr"] * (after / before)


def _change_schedule(schedule: Any, saved: Settings, current: Settings) -> None:
    """Applies changed settings to a schedule; an object within the schedule is its state in `saved` and `current`."""
    for key in _changed(saved, _plain(current)):
        values = vars(schedule).get(key), saved[key], current[key]
        parts = zip(*(value if isinstance(value, list) else [value] for value in values), strict=False)
        objects = [part for part in parts if hasattr(part[0], "__dict__") and not isinstance(part[0], dict)]
        if not objects and (isinstance(values[0], dict) or not isinstance(current[key], dict)):
            setattr(schedule, key, current[key])
        for part, saved_part, current_part in objects:
            if isinstance(saved_part, dict) and isinstance(current_part, dict):
                _change_schedule(part, saved_part, current_part)
    if hasattr(schedule, "_last_lr") and hasattr(schedule, "optimizer"):
        set_last_rates(schedule)


def _changed(saved: Settings, current: Settings) -> list[str]:
    """Returns the names of the settings that differ, without those that record progress."""
    return [key for key in current if key not in _PROGRESS and key in saved and saved[key] != current[key]]


def _plain(settings: Settings | None) -> Settings:
    """Returns the settings that are plain types (numbers, strings, lists or dicts); {} for an object without state."""
    plain = {}
    for key, value in (settings or {}).items():
        with suppress(TypeError):
            plain[_as_plain(key)] = _as_plain(value)
    return plain


def _as_plain(value: Any) -> Any:
    """Returns a value as plain types; raises a TypeError for any other type."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):  # also converts subclasses, such as numpy.float64
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, list | tuple):
        return [_as_plain(item) for item in value]
    if isinstance(value, dict):
        return _plain(value)
    raise TypeError(f"{type(value)} is not a plain type")
