"""Progress output: a bar in a terminal, and plain lines at intervals elsewhere."""

import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from rich.text import Text

from rankzero.messages import print_line
from rankzero.runs.reports.shown_metrics import metrics_line
from rankzero.training.hooks import LoopCallback

INTERVAL_SECONDS = 10.0
JOB_LAUNCHERS = ("mpi", "pbs", "slurm")
"""Launchers whose output is plain lines: it usually goes to a file, although mpirun provides a pseudo-terminal."""

LINE_COLUMNS = 120
"""Maximum length of a line."""


def progress_callbacks(
    lightning_arguments: Mapping[str, Any], callbacks: Sequence[Callback], launcher: str
) -> list[Callback]:
    """Returns the progress callback of a Trainer; none if the user provides a progress bar or has disabled it.

    Args:
        lightning_arguments: Arguments for Lightning's Trainer that the user has passed.
        callbacks: The user's callbacks.
        launcher: The launcher of this process, see `rankzero.distributed.environments.launch.Launch`.
    """
    has_bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
    if has_bar or lightning_arguments.get("barebones") or lightning_arguments.get("enable_progress_bar") is False:
        return []
    has_terminal = sys.stdout.isatty() and launcher not in JOB_LAUNCHERS
    return [BarProgress() if has_terminal else PlainProgress()]


class BarProgress(LoopCallback, RichProgressBar):
    """Lightning's bar, but it counts epochs from 1, as all other output of Rankzero does.

    It is redrawn at most ten times per second, since reading a metric waits for the device.
    """

    on_train_batch_end = Callback.on_train_batch_end

    def on_tick(self, trainer: Trainer, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, trainer.lightning_module, None, batch, batch_idx)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        metrics: dict[str, Any] = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)  # the logger's version, which is always "tensorboard"
        return metrics

    def _init_progress(self, trainer: Trainer) -> None:
        previous = self.progress
        super()._init_progress(trainer)
        if self.progress is not None and self.progress is not previous:
            for column in self.progress.columns:
                self._keep_to_one_line(column)

    @staticmethod
    def _keep_to_one_line(column: Any) -> None:
        """Truncates a column's text at the edge of the terminal, where Lightning's class would wrap it."""
        render = column.render

        def render_one_line(task: Any) -> Any:
            text = render(task)
            if isinstance(text, Text):
                text.no_wrap, text.overflow = True, "ellipsis"
            return text

        column.render = render_one_line

    def _get_train_description(self, current_epoch: int) -> str:
        return _epoch(self.trainer)


class PlainProgress(LoopCallback, ProgressBar):
    """Prints lines at the end of epochs and during long epochs, at least `interval_seconds` apart.

    The ends of the first and the last epoch always get a line. A long validation, test or prediction gets lines too.

    Args:
        interval_seconds: Minimum time between two lines, in seconds.
    """

    def __init__(self, interval_seconds: float = INTERVAL_SECONDS) -> None:
        super().__init__()
        self.interval_seconds = interval_seconds
        self.enabled = True
        self._printed_at = 0.0

    def enable(self) -> None:
        """Enables printing, only on rank zero; a finder calls this method on all ranks."""
        self.enabled = self._trainer is None or self._trainer.is_global_zero

    def disable(self) -> None:
        """Disables printing: on all ranks but zero, and during a finder's trials."""
        self.enabled = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._started_at = self._printed_at = time.monotonic()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started_at = self._printed_at = time.monotonic()
        self._first_epoch = trainer.current_epoch

    def on_tick(self, trainer: Trainer, batch: Any, batch_idx: int) -> None:
        if self.enabled and time.monotonic() - self._printed_at >= self.interval_seconds:
            self._print(trainer, f"batch {batch_idx + 1}/{trainer.num_training_batches}")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        is_last_epoch = trainer.current_epoch + 1 == trainer.max_epochs
        is_due = time.monotonic() - self._printed_at >= self.interval_seconds
        if self.enabled and (is_last_epoch or is_due or trainer.current_epoch == self._first_epoch):
            self._print(trainer, "done")

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        label, batches = "validation", trainer.num_val_batches
        if trainer.sanity_checking:
            label, batches = "validation before training,", trainer.num_sanity_val_batches
        elif trainer.state.fn is TrainerFn.FITTING:
            label = f"{_epoch(trainer)} validation"
        self._print_batch(label, batch_idx, dataloader_idx, batches)

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._print_batch("test", batch_idx, dataloader_idx, trainer.num_test_batches)

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._print_batch("prediction", batch_idx, dataloader_idx, trainer.num_predict_batches)

    def _print_batch(self, label: str, batch: int, loader: int, batches: Sequence[float]) -> None:
        if not self.enabled or time.monotonic() - self._printed_at < self.interval_seconds:
            return
        self._printed_at = time.monotonic()
        of_batches = f"/{batches[loader]}" if math.isfinite(batches[loader]) else ""
        of_loader = f" of loader {loader + 1}/{len(batches)}" if len(batches) > 1 else ""
        print_line(f"{label} batch {batch + 1}{of_batches}{of_loader}  {self._printed_at - self._started_at:.0f} s")

    def _print(self, trainer: Trainer, position: str) -> None:
        self._printed_at = time.monotonic()
        head = f"{_epoch(trainer)} {position}  step {trainer.global_step}"
        tail = f"{self._printed_at - self._started_at:.0f} s"
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        print_line(metrics_line(head, metrics, trainer.progress_bar_metrics, tail, LINE_COLUMNS))


def _epoch(trainer: Trainer) -> str:
    total = f"/{trainer.max_epochs}" if trainer.max_epochs and trainer.max_epochs > 0 else ""
    return f"epoch {trainer.current_epoch + 1}{total}"
