"""Gives changed settings of optimizers and schedules precedence over the settings in a checkpoint.

A state dict of torch contains settings (learning rate, momentum) in addition to progress, so loading it restores the
old settings. Here, a checkpoint also records the settings as configured. If a setting is configured differently in a
resumed run, the new value replaces the restored one.
"""

from contextlib import suppress
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from rankzero.training.hooks import LoopCallback

Settings = dict[str, Any]

_PROGRESS = ("last_epoch", "_step_count", "_last_lr", "best", "num_bad_epochs", "cooldown_counter", "lr")


class OptimizerOverrides(LoopCallback):
    """Saves the configured settings of optimizers and schedules, and applies changed ones after a resume."""

    def __init__(self) -> None:
        self._groups: list[list[Settings]] = []
        self._configured: list[Any] = []
        self._schedules: list[Settings] = []
        self._now: dict[str, list[Any]] = {}
        self._then: dict[str, list[Any]] | None = None

    def on_configured(self, trainer: Trainer) -> None:
        self._groups = [
            [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
            for optimizer in trainer.optimizers
        ]
        self._configured = [config.scheduler for config in trainer.lr_scheduler_configs]
        self._schedules = [schedule.state_dict() for schedule in self._configured]
        self._now = {
            "optimizers": [[_plain(group) for group in groups] for groups in self._groups],
            "schedules": [_plain(schedule) for schedule in self._schedules],
        }

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["configured"] = self._now

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._then = checkpoint.get("configured")

    def on_ready(self, trainer: Trainer) -> None:
        then, self._then = self._then, None
        if not then:
            return
        for optimizer, befores, nows in zip(trainer.optimizers, then["optimizers"], self._groups, strict=False):
            for group, was, now in zip(optimizer.param_groups, befores, nows, strict=False):
                _change_group(group, was, now)
        in_place = [config.scheduler for config in trainer.lr_scheduler_configs]
        for schedule, was, now in zip(self._configured, then["schedules"], self._schedules, strict=False):
            if schedule in in_place:  # a callback may have replaced the schedule
                _change_schedule(schedule, was, now)


def _change_group(group: Settings, was: Settings, now: Settings) -> None:
    group.update({key: now[key] for key in _changed(was, _plain(now))})
    # A schedule has changed the rate since then, so the current rate is scaled by the ratio of the configured rates.
    before, after = (settings.get("initial_lr", settings.get("lr")) for settings in (was, now))
    if before != after and before and after is not None:
        group["lr"] = group["lr"] * (after / before)


def _change_schedule(schedule: Any, was: Settings, now: Settings) -> None:
    """Applies changed settings to a schedule; an object within the schedule appears in `was` and `now` as its state."""
    for key in _changed(was, _plain(now)):
        part = vars(schedule).get(key)
        parts, befores, nows = (value if isinstance(value, list) else [value] for value in (part, was[key], now[key]))
        inner = [hasattr(part_now, "__dict__") and not isinstance(part_now, dict) for part_now in parts]
        if not any(inner) and (isinstance(part, dict) or not isinstance(now[key], dict)):
            setattr(schedule, key, now[key])
        for part_now, old, new, is_object in zip(parts, befores, nows, inner, strict=False):
            if is_object and isinstance(old, dict) and isinstance(new, dict):
                _change_schedule(part_now, old, new)
    if hasattr(schedule, "_last_lr") and hasattr(schedule, "optimizer"):
        schedule._last_lr = [group["lr"] for group in schedule.optimizer.param_groups]


def _changed(was: Settings, now: Settings) -> list[str]:
    """Returns the names of the settings that differ, without those that record progress."""
    return [key for key in now if key not in _PROGRESS and key in was and was[key] != now[key]]


def _plain(settings: Settings) -> Settings:
    """Returns the settings that are plain types (numbers, strings, lists or dicts), as a checkpoint stores them."""
    found = {}
    for key, value in settings.items():
        with suppress(TypeError):
            found[_as_plain(key)] = _as_plain(value)
    return found


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
    raise TypeError(f"{type(value)} is no plain type")
