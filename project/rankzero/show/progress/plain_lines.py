"""Progress lines for files, pipes and jobs: few, short and complete."""

import time
from collections.abc import Callable

from lightning.pytorch import LightningModule, Trainer

from rankzero.distributed.devices import HostCopy
from rankzero.messages import print_line
from rankzero.show.progress.fit_progress import (
    RunProgress,
    batch_text,
    batches_text,
    epoch_text,
    evaluation_batches,
    evaluation_label,
    rate_text,
)
from rankzero.text import metrics_line, numbers, rough_duration

INTERVAL_SECONDS = 10.0
"""Minimum time between two lines."""


class PlainProgress(RunProgress):
    """Prints lines at the end of epochs and during long epochs, at intervals that grow with the duration of the run.

    The ends of the first and the last epoch always get a line. A long validation, test or prediction gets lines too.
    """

    def __init__(self, interval_seconds: float = INTERVAL_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self.interval_seconds = interval_seconds
        self._started_at = self._due_at = self._validation_due_at = 0.0
        self._is_first_epoch = True
        self._unprinted_epoch: str | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._validation_due_at = 0.0
        self._start()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._start()
        self._is_first_epoch, self._unprinted_epoch = True, None

    def show_batch(self, trainer: Trainer, batches: int) -> None:
        """Prints a line if one is due, but not at the end of an epoch, which gets a line of its own."""
        if self._is_due and not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            text = batch_text(batches, trainer.num_training_batches)
            self._print(trainer, f"{epoch_text(trainer)} {text}  step {trainer.global_step}")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        head = f"{epoch_text(trainer)} done  step {trainer.global_step}"
        if self._is_first_epoch or self._is_due:
            self._print(trainer, head)
            head = ""
        self._is_first_epoch, self._unprinted_epoch = False, head or None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the end of the last epoch. Which epoch is the last, is known only now: limits and callbacks decide."""
        if self._unprinted_epoch is not None:
            self._print(trainer, self._unprinted_epoch, has_ended=True)
            self._unprinted_epoch = None
        super().on_train_end(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_start(trainer, pl_module)
        self._validation_due_at = self.clock() + self.interval_seconds

    def show_evaluation(self, trainer: Trainer, batches: int, loader: int) -> None:
        """Prints a line of a validation, a test or a prediction if one is due, but none of a short validation."""
        if self._is_due and self.clock() >= self._validation_due_at:
            label = evaluation_label(trainer) + "," * trainer.sanity_checking
            print_line(f"{label} {batches_text(batches, evaluation_batches(trainer), loader)}  {self._times()}")

    @property
    def _is_due(self) -> bool:
        return self.enabled and self.clock() >= self._due_at

    def _start(self) -> None:
        self._started_at = self.clock()
        self._schedule_next()

    def _schedule_next(self) -> float:
        """Determines when the next line is due; returns the seconds since the start.

        The time between two lines is a tenth of those, at most 15 minutes, and after 12.5 hours 2 % of them. A run
        prints about 10 lines in 100 s, 35 in 15 minutes, 55 in two hours, 130 in a day and 300 in a month.
        """
        now = self.clock()
        elapsed = now - self._started_at
        self._due_at = now + max(self.interval_seconds, min(0.1 * elapsed, 900.0), 0.02 * elapsed)
        return elapsed

    def _print(self, trainer: Trainer, head: str, has_ended: bool = False) -> None:
        if not self.enabled:
            return
        rate = self._fit.samples_per_second if self._fit is not None else None
        tail = (f"{rate_text(rate)}  " if rate is not None else "") + self._times(has_ended)
        metrics = numbers(HostCopy(trainer.callback_metrics).wait())
        print_line(metrics_line(head, metrics, trainer.progress_bar_metrics, tail))

    def _times(self, has_ended: bool = False) -> str:
        """Returns the time since the start and the time left."""
        elapsed = self._schedule_next()
        text = f"{elapsed:.0f} s" if elapsed < 600 else rough_duration(elapsed)  # lines are 10 s apart at first
        seconds_left = self._fit.seconds_left if self._fit is not None and not has_ended else None
        return text if seconds_left is None else f"{text}, {rough_duration(seconds_left)} left"
