"""Callbacks that time Rankzero in a benchmark: from after the first epoch or first steps to the end of training."""

import json
import time
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer

from rankzero.training.hooks import LoopCallback


class Clock(LoopCallback):
    """Callback that writes the mean seconds per step after the first epoch, including saves and ends of epochs.

    Args:
        path: JSON file to write.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._started: float | None = None
        self._steps = 0

    def on_epoch_done(self, trainer: Trainer) -> None:
        if self._started is None:
            self._started, self._steps = time.perf_counter(), trainer.global_step

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._started is not None, "two epochs are the least"
        if trainer.is_global_zero:
            steps = trainer.global_step - self._steps
            self.path.write_text(json.dumps((time.perf_counter() - self._started) / steps))


class StepClock(LoopCallback):
    """Callback that writes the mean seconds per step, without the first steps.

    Args:
        path: JSON file to write.
        first: Number of steps to leave out at the beginning.
    """

    def __init__(self, path: str, first: int = 1) -> None:
        self.path, self.first = Path(path), first

    def on_step_done(self, trainer: Trainer) -> None:
        steps = trainer.global_step - self.first
        if steps == 0:
            self._started = time.perf_counter()
        elif trainer.is_global_zero and steps > 0 and trainer.global_step == trainer.estimated_stepping_batches:
            self.path.write_text(json.dumps((time.perf_counter() - self._started) / steps))
