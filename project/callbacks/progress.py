"""Progress: a bar in a terminal, elsewhere a plain line now and then."""

import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar
from torch import Tensor

from project.say import show

EVERY_SECONDS = 10.0


class BarProgress(RichProgressBar):
    """Lightning's bar, which counts epochs from 1 as all our other lines do."""

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        metrics: dict[str, Any] = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)  # the logger's version, which is always "tensorboard"
        return metrics

    def _get_train_description(self, current_epoch: int) -> str:
        return _epoch(self.trainer)


class PlainProgress(ProgressBar):
    """Prints a line at the end of an epoch, and within a long one, but none sooner than `every_seconds` after another.

    The first and the last epoch always have theirs.

    Args:
        every_seconds: The least time between two lines.
    """

    def __init__(self, every_seconds: float = EVERY_SECONDS) -> None:
        super().__init__()
        self.every_seconds = every_seconds
        self.enabled = True
        self._printed = 0.0

    def enable(self) -> None:
        """Prints, on rank zero."""
        self.enabled = True

    def disable(self) -> None:
        """Does not print, on the other ranks."""
        self.enabled = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = self._printed = time.monotonic()
        self._first = trainer.current_epoch

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.enabled and time.monotonic() - self._printed >= self.every_seconds:
            self._print(trainer, pl_module, f"batch {batch_idx + 1}/{trainer.num_training_batches}")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        last = trainer.current_epoch + 1 == trainer.max_epochs
        due = time.monotonic() - self._printed >= self.every_seconds
        if self.enabled and (last or due or trainer.current_epoch == self._first):
            self._print(trainer, pl_module, "done")

    def _print(self, trainer: Trainer, pl_module: LightningModule, where: str) -> None:
        self._printed = time.monotonic()
        metrics = "  ".join(f"{name} {_short(value)}" for name, value in sorted(trainer.callback_metrics.items()))
        seconds = self._printed - self._started
        show(f"{_epoch(trainer)} {where}  step {trainer.global_step}  {metrics}  {seconds:.0f} s")


def _epoch(trainer: Trainer) -> str:
    last = f"/{trainer.max_epochs}" if trainer.max_epochs and trainer.max_epochs > 0 else ""
    return f"epoch {trainer.current_epoch + 1}{last}"


def _short(value: float | Tensor) -> str:
    return f"{float(value):.4g}"
