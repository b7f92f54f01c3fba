"""What our side of a benchmark is timed with: from behind the first epoch, or some steps, to the end of training."""

import json
import time
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer

from rankzero.training.hooks import LoopCallback


class Clock(LoopCallback):
    """Writes how many seconds a step has cost, saves and ends of epochs included, but for the first epoch.

    Args:
        path: Where, as JSON.
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
    """Writes how many seconds a step has cost, but for the first ones.

    Args:
        path: Where, as JSON.
        first: How many do not count.
    """

    def __init__(self, path: str, first: int = 1) -> None:
        self.path, self.first = Path(path), first

    def on_step_done(self, trainer: Trainer) -> None:
        steps = trainer.global_step - self.first
        if steps == 0:
            self._started = time.perf_counter()
        elif trainer.is_global_zero and steps > 0 and trainer.global_step == trainer.estimated_stepping_batches:
            self.path.write_text(json.dumps((time.perf_counter() - self._started) / steps))
