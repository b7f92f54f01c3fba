"""What the flags say of optimisers and schedules wins over what a checkpoint remembers of them.

A state dict of torch holds settings (a rate, a momentum) beside progress, and loading it brings back the old settings.
Here a checkpoint also notes the settings as they were configured; one that is configured differently now is put in.
"""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer

from project.loops import LoopCallback

Settings = dict[str, Any]

_PROGRESS = ("last_epoch", "_step_count", "_last_lr", "best", "num_bad_epochs", "cooldown_counter", "lr")


class ConfiguredSettings(LoopCallback):
    """Saves the settings of optimisers and schedules, and has those that are changed win."""

    def __init__(self) -> None:
        self._now: dict[str, list[Any]] = {}
        self._then: dict[str, list[Any]] | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lightning restores the training state behind this."""
        self._now = {
            "optimizers": [[_plain(group) for group in optimizer.param_groups] for optimizer in trainer.optimizers],
            "schedules": [_plain(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs],
        }

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["configured"] = self._now

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._then = checkpoint.get("configured")

    def on_ready(self, trainer: Trainer) -> None:
        then, self._then = self._then, None
        if not then:
            return
        for optimizer, was, now in zip(trainer.optimizers, then["optimizers"], self._now["optimizers"], strict=False):
            _change(optimizer, was, now)
        for config, was, now in zip(
            trainer.lr_scheduler_configs, then["schedules"], self._now["schedules"], strict=False
        ):
            vars(config.scheduler).update(_changed(was, now))
            if hasattr(config.scheduler, "_last_lr"):
                config.scheduler._last_lr = [group["lr"] for group in config.scheduler.optimizer.param_groups]


def _change(optimizer: Optimizer, was: list[Settings], now: list[Settings]) -> None:
    for group, old, new in zip(optimizer.param_groups, was, now, strict=False):
        group.update(_changed(old, new))
        # A schedule has moved the rate since: it goes on from where it is, in proportion.
        before, after = (settings.get("initial_lr", settings.get("lr")) for settings in (old, new))
        if before != after and before and after is not None:
            group["lr"] = group["lr"] * (after / before)


def _changed(was: Settings, now: Settings) -> Settings:
    """The settings that are not what they were."""
    return {key: value for key, value in now.items() if key not in _PROGRESS and key in was and was[key] != value}


def _plain(settings: Settings) -> Settings:
    """Those that are numbers, words, or rows of them."""

    def is_plain(value: Any) -> bool:
        return isinstance(value, str | int | float | None) or (
            isinstance(value, list | tuple) and all(isinstance(item, str | int | float | None) for item in value)
        )

    return {key: value for key, value in settings.items() if key != "params" and is_plain(value)}
