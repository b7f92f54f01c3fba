"""What the flags say of optimisers and schedules wins over what a checkpoint remembers of them.

A state dict of torch holds settings (a rate, a momentum) beside progress, and loading it brings back the old settings.
Here a checkpoint also notes the settings as they were configured; one that is configured differently now is put in.
"""

from contextlib import suppress
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from rankzero.training.hooks import LoopCallback

Settings = dict[str, Any]

_PROGRESS = ("last_epoch", "_step_count", "_last_lr", "best", "num_bad_epochs", "cooldown_counter", "lr")


class OptimizerOverrides(LoopCallback):
    """Saves the settings of optimisers and schedules, and has those that are changed win."""

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
            if schedule in in_place:  # a callback may have put another one in its place
                _change_schedule(schedule, was, now)


def _change_group(group: Settings, was: Settings, now: Settings) -> None:
    group.update({key: now[key] for key in _changed(was, _plain(now))})
    # A schedule has moved the rate since: it goes on from where it is, in proportion.
    before, after = (settings.get("initial_lr", settings.get("lr")) for settings in (was, now))
    if before != after and before and after is not None:
        group["lr"] = group["lr"] * (after / before)


def _change_schedule(schedule: Any, was: Settings, now: Settings) -> None:
    """Puts in what is changed: `now` is a state dict, and what it holds of other objects is their state."""
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
    """The names of settings that are not what they were."""
    return [key for key in now if key not in _PROGRESS and key in was and was[key] != now[key]]


def _plain(settings: Settings) -> Settings:
    """Those that are numbers, words, or made up of them, as a checkpoint holds them."""
    found = {}
    for key, value in settings.items():
        with suppress(TypeError):
            found[_as_plain(key)] = _as_plain(value)
    return found


def _as_plain(value: Any) -> Any:
    """Raises a TypeError where it is something else."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):  # and not what is made of them, as numpy's numbers are
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, list | tuple):
        return [_as_plain(item) for item in value]
    if isinstance(value, dict):
        return _plain(value)
    raise TypeError(f"{type(value)} is no plain type")
