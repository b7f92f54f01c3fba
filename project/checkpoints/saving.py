"""When checkpoints are saved, and how many are kept."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from project.checkpoints.durable import remove_directory
from project.checkpoints.manifest import checkpoints_in
from project.loops import LoopCallback, fit_loop_of

CLOCK_STEPS = 16
"""How many steps pass between two looks at the clock, which all ranks take together."""

_SECONDS = {"s": 1, "min": 60, "h": 3600}


@dataclass(frozen=True)
class Interval:
    """How often to save: every so many epochs, optimiser steps or seconds."""

    epochs: int = 0
    steps: int = 0
    seconds: float = 0

    @classmethod
    def read(cls, text: str) -> "Interval":
        """Reads `5`, `200steps`, `90s`, `15min` or `2h`."""
        match = re.fullmatch(r"([0-9]+)(steps?|s|min|h)?", text)
        assert match, text
        number, unit = int(match[1]), match[2]
        if unit is None:
            return cls(epochs=number)
        return cls(steps=number) if unit.startswith("step") else cls(seconds=number * _SECONDS[unit])


class SaveCheckpoints(LoopCallback, Checkpoint):
    """Saves at an interval, and at the end; keeps the newest few. All ranks must have it.

    It saves when nothing is half done. What falls due at an epoch's last step is saved at the epoch's end, which
    follows at once.

    Args:
        folder: Where the checkpoints go.
        every: The interval.
        record: Returns what a checkpoint says of the run beside its state: plain types, free of ranks.
        keep: How many checkpoints are kept; an older one is deleted only after a newer one is written.
    """

    def __init__(self, folder: Path, every: Interval, record: Callable[[], dict[str, Any]], keep: int = 3) -> None:
        self.folder, self.every, self.record, self.keep = folder, every, record, keep
        self.saved_at: Any = None
        self.seen = 0
        self.looked_at_clock = 0.0
        self._due = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen = trainer.global_step
        if trainer.ckpt_path:
            self.saved_at = self._place(trainer)
        self.looked_at_clock = time.monotonic()

    def on_step_done(self, trainer: Trainer) -> None:
        """All ranks must call."""
        self._due |= self._falls_due(trainer)

    def on_epoch_done(self, trainer: Trainer) -> None:
        self._due |= bool(self.every.epochs) and trainer.current_epoch % self.every.epochs == 0

    def on_safe_point(self, trainer: Trainer) -> None:
        """All ranks must call."""
        if self._due or fit_loop_of(trainer).epoch_loop.done:
            self.save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.save(trainer)

    def _falls_due(self, trainer: Trainer) -> bool:
        """Whether the last step passed an interval. All ranks must call."""
        step, before = trainer.global_step, self.seen
        self.seen = step
        if self.every.steps:
            return step // self.every.steps > before // self.every.steps
        if not self.every.seconds or step // CLOCK_STEPS == before // CLOCK_STEPS:
            return False
        due: bool = trainer.strategy.broadcast(time.monotonic() - self.looked_at_clock >= self.every.seconds)
        return due

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["rankzero"] = self.record()

    @staticmethod
    def _place(trainer: Trainer) -> tuple[int, Any]:
        """How far the run has come; an epoch's end is further than its last step."""
        return trainer.global_step, fit_loop_of(trainer).place

    def save(self, trainer: Trainer, wait: bool = False) -> None:
        step = trainer.global_step
        self._due, self.looked_at_clock = False, time.monotonic()
        if self._place(trainer) == self.saved_at or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        for logger in trainer.loggers:  # what the checkpoint comes behind is to be on the disk before it
            logger.save()
        trainer.save_checkpoint(self.folder / f"step-{step:08d}")
        self.saved_at = self._place(trainer)
        if trainer.is_global_zero:
            for old in checkpoints_in(self.folder)[: -self.keep]:
                remove_directory(old)
