"""What both kinds of progress show: speed and time left of a fit, and the batches of an evaluation."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from enum import Enum
from math import inf, isfinite
from typing import Any, NamedTuple

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, Timer
from lightning.pytorch.trainer.states import TrainerFn

from rankzero.show.measurements.throughput import Throughput
from rankzero.training.callbacks.safe_point import SafePoint
from rankzero.training.fit_loop import FitLoop
from rankzero.training.hooks import LoopCallback
from rankzero.training.validations import ValidationSchedule

WINDOW_SECONDS = 30.0
ENTRY_SECONDS = 0.5


class RecentRate:
    """Rate at which a count has grown within `WINDOW_SECONDS`, or between the last two records if longer ago."""

    def __init__(self) -> None:
        self._records: deque[tuple[float, float]] = deque()
        self._last: tuple[float, float] | None = None

    def record(self, seconds: float, count: float) -> None:
        """Records the count at a time; the time must not decrease."""
        self._last = (seconds, count)
        records = self._records
        if not records or seconds - records[-1][0] >= ENTRY_SECONDS:
            records.append(self._last)
            while len(records) > 2 and seconds - records[1][0] >= WINDOW_SECONDS:
                records.popleft()

    @property
    def per_second(self) -> float | None:
        """The rate; None before the count has grown."""
        if self._last is None:
            return None
        seconds, count = (last - first for last, first in zip(self._last, self._records[0], strict=True))
        return count / seconds if seconds > 0 and count > 0 else None


def rate_text(per_second: float) -> str:
    """Returns a training speed as `710 samples/s`; below 10, it has one decimal."""
    return f"{per_second:,.0f} samples/s" if per_second >= 9.95 else f"{per_second:.1f} samples/s"


MIN_SECONDS = 1.0
"""Measured time that an estimate needs."""

PHASE_SECONDS, PHASE_COUNT = 300.0, 8
"""Older durations count less as soon as a phase has been measured for this time and this often."""


class Phase(Enum):
    """What a run spends its time on."""

    BATCHES = "training batches"
    VALIDATION = "a validation"
    EPOCH_END = "the end of an epoch, without its validation"


class Position(NamedTuple):
    """How far a run has come: counts of ended epochs, of batches in this epoch and in all epochs, and of steps."""

    epochs: int
    batches: int
    total_batches: int
    steps: int


class FitProgress:
    """Measures speed and time left of a fit: the seconds of a batch, of a validation, and of the end of an epoch.

    A progress callback creates it at the start of training and calls it in the hooks named below. The first batch is
    not measured, since it includes the start of loader processes and other preparations.
    """

    def __init__(self, trainer: Trainer, clock: Callable[[], float] = time.monotonic) -> None:
        callbacks: Iterable[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        self._trainer, self._progress = trainer, trainer.fit_loop.epoch_loop.batch_progress
        self._throughput = next((callback for callback in callbacks if isinstance(callback, Throughput)), None)
        self._timers = [callback for callback in callbacks if isinstance(callback, Timer)]
        loop = trainer.fit_loop
        subscribers = loop.extra_subscribers if isinstance(loop, FitLoop) else []
        self._time_limits = [item.time_budget for item in subscribers if isinstance(item, SafePoint)]
        self._samples = RecentRate()
        self._validated_batches = self._batches_at_epoch_start = -1
        self._epoch_batches = inf
        self._clock = clock
        self._first = self._last = self._last_step = self._position
        self._phase: Phase | None = None
        self._interrupted: Phase | None = None
        self._since, self._measured_seconds = self._unpaused_time(), 0.0
        self._seconds, self._counts = dict.fromkeys(Phase, 0.0), dict.fromkeys(Phase, 0.0)

    def begin_epoch(self) -> None:
        """Called in `on_train_epoch_start`."""
        self._batches_at_epoch_start = self._progress.total.processed  # type: ignore[attr-defined]
        if self._phase is Phase.EPOCH_END:
            self._measure(1)
            self._phase = Phase.BATCHES

    def tick(self) -> None:
        """Called in `on_tick`."""
        self._measure_batches()
        if self._progress.is_last_batch:
            self._epoch_batches = self._progress.current.processed  # type: ignore[attr-defined]
            self._phase = Phase.EPOCH_END
        if self._throughput is not None:
            self._samples.record(self._throughput.training_seconds, self._throughput.attempt_samples)

    def begin_validation(self) -> None:
        """Called in `on_validation_start`; a validation interrupts the batches or the end of an epoch."""
        if self._phase is Phase.BATCHES:
            self._measure_batches()
        else:
            self._measure(0)
        self._interrupted, self._phase = self._phase, Phase.VALIDATION

    def end_validation(self) -> None:
        """Called in `on_validation_end`."""
        self._measure(1)
        self._phase = self._interrupted
        self._validated_batches = self._position.total_batches

    @property
    def samples_per_second(self) -> float | None:
        """Recent training speed over all ranks, without validation; None if it is not known."""
        return self._samples.per_second

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the run ends; None if the run has no end, or if too little is known."""
        trainer, time_limit = self._trainer, min(self._seconds_to_time_limits())
        if trainer.max_epochs in (None, -1) and trainer.max_steps < 0:
            return max(0.0, time_limit) if isfinite(time_limit) else None
        schedule, batch_seconds = ValidationSchedule.of(trainer), self._mean(Phase.BATCHES)
        if not isfinite(schedule.epoch_batches):  # the length of an epoch is that of the last one
            schedule = replace(schedule, epoch_batches=self._epoch_batches)
        batches = self._batches_left(schedule.epoch_batches)
        if batches is None or batch_seconds is None:
            return None
        validation_seconds = self._mean(Phase.VALIDATION)
        if validation_seconds is None:
            size = sum(trainer.num_val_batches)
            validation_seconds = size * batch_seconds if isfinite(size) else 0.0
        epoch_end_seconds = self._mean(Phase.EPOCH_END) or 0.0
        left = batches * batch_seconds + self._validations_left(schedule, batches) * validation_seconds
        left += (self._position.batches + batches) // schedule.epoch_batches * epoch_end_seconds
        if self._phase in (Phase.VALIDATION, Phase.EPOCH_END):
            expected = validation_seconds if self._phase is Phase.VALIDATION else epoch_end_seconds
            left -= min(self._unpaused_time() - self._since, expected)
        return max(0.0, min(left, time_limit))

    def _unpaused_time(self) -> float:
        """Returns the time in seconds, without the rare pauses in which images are drawn."""
        return self._clock() - (self._throughput.paused_seconds if self._throughput is not None else 0.0)

    @property
    def _position(self) -> Position:
        total: int = self._progress.total.processed  # type: ignore[attr-defined]
        # Lightning resets the batches of an epoch after `on_train_epoch_start`; `current_epoch` has changed before.
        has_begun = total != self._batches_at_epoch_start
        batches = self._progress.current.processed if has_begun else 0  # type: ignore[attr-defined]
        return Position(self._trainer.current_epoch, batches, total, self._trainer.global_step)

    def _seconds_to_time_limits(self) -> list[float]:
        """Returns the seconds until `max_time` and until the run must stop for its time limit; infinity without any."""
        timers = [timer.time_remaining() for timer in self._timers]
        limits = [limit.seconds_for_steps for limit in self._time_limits]
        return [inf, *limits, *(seconds for seconds in timers if seconds is not None)]

    def _measure_batches(self) -> None:
        """Measures the batches since the last call."""
        position = self._position
        if self._phase is None:
            self._phase, self._since = Phase.BATCHES, self._unpaused_time()
        else:
            self._measure(position.total_batches - self._last.total_batches)
        if position.steps > self._last_step.steps:
            self._last_step = position
        self._last = position

    def _measure(self, count: int) -> None:
        """Adds the time since the last call, and what was done in it, to the current phase."""
        now, phase = self._unpaused_time(), self._phase
        if phase is not None:
            self._seconds[phase] += now - self._since
            self._counts[phase] += count
            if self._seconds[phase] > PHASE_SECONDS and self._counts[phase] > PHASE_COUNT:
                self._seconds[phase] /= 2
                self._counts[phase] /= 2
            self._measured_seconds += now - self._since
        self._since = now

    def _mean(self, phase: Phase) -> float | None:
        """Returns the mean seconds of a phase; None before it was measured."""
        if not self._counts[phase] or self._measured_seconds < MIN_SECONDS:
            return None
        return self._seconds[phase] / self._counts[phase]

    def _batches_left(self, epoch_batches: float) -> float | None:
        """Returns the number of batches until the run ends; None if it cannot be determined."""
        position, last, left = self._position, self._last_step, inf
        max_epochs, max_steps = self._trainer.max_epochs, self._trainer.max_steps
        if max_steps >= 0:
            steps = last.steps - self._first.steps
            if steps <= 0:
                return None
            batches_per_step = (last.total_batches - self._first.total_batches) / steps
            left = (max_steps - last.steps) * batches_per_step - (position.total_batches - last.total_batches)
        if max_epochs is not None and max_epochs >= 0:
            if not isfinite(epoch_batches):
                return None
            left = min(left, (max_epochs - position.epochs) * epoch_batches - position.batches)
        return max(0.0, left)

    def _validations_left(self, schedule: ValidationSchedule, batches: float) -> float:
        """Returns the number of validations within the next `batches` batches, with one that is due now."""
        if schedule.validates and schedule.validation_interval is None:  # validations are due at intervals of time
            measured_batches = self._counts[Phase.BATCHES]
            return batches * self._counts[Phase.VALIDATION] / measured_batches if measured_batches else 0.0
        epochs, done, total, _ = self._position
        start = done if self._validated_batches == total else max(0, done - 1)
        return schedule.count(epochs, total - done, start, done + batches)


def epoch_text(trainer: Trainer) -> str:
    """Returns the number of the current epoch, from 1, as `epoch 3/20`; without a limit of epochs as `epoch 3`."""
    total = f"/{trainer.max_epochs}" if trainer.max_epochs and trainer.max_epochs > 0 else ""
    return f"epoch {trainer.current_epoch + 1}{total}"


class RunProgress(LoopCallback, ProgressBar):
    """Base of both displays: measures a fit while the display is enabled, and calls the methods that show it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.clock, self.enabled = clock, True
        self._fit: FitProgress | None = None

    def enable(self) -> None:
        """Enables the display, only on rank zero; a finder calls this method on all ranks."""
        self.enabled = self._trainer is None or self._trainer.is_global_zero

    def disable(self) -> None:
        """Disables the display: on all ranks but zero, and during a finder's trials."""
        self.enabled = False

    @property
    def is_enabled(self) -> bool:
        """Whether the display is enabled; `LightningModule.print` reads this."""
        return self.enabled

    def show_batch(self, trainer: Trainer, batches: int) -> None:
        """Shows the progress of an epoch."""
        raise NotImplementedError

    def show_evaluation(self, trainer: Trainer, batches: int, total: float, text: str) -> None:
        """Shows the progress of a loader of a validation, a test or a prediction; `text` states it too."""
        raise NotImplementedError

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._fit = FitProgress(trainer, self.clock) if self.enabled else None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is not None:
            self._fit.begin_epoch()

    def on_tick(self, trainer: Trainer, batch: Any, batch_idx: int) -> None:
        if self._fit is not None:
            self._fit.tick()
            self.show_batch(trainer, batch_idx + 1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._fit = None  # a test or prediction that follows has other numbers

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is not None and trainer.state.fn is TrainerFn.FITTING:
            self._fit.begin_validation()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is not None and trainer.state.fn is TrainerFn.FITTING:
            self._fit.end_validation()

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.show_loader(trainer, batch_idx + 1, dataloader_idx)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def show_loader(self, trainer: Trainer, batches: int, loader: int = 0) -> None:
        """Shows how many batches of a loader are evaluated, as `batch 3/8` or `batch 3/8 of loader 1/2`."""
        if self.enabled:
            totals = evaluation_batches(trainer)
            text = batch_text(batches, totals[loader])
            text += f" of loader {loader + 1}/{len(totals)}" if len(totals) > 1 else ""
            self.show_evaluation(trainer, batches, totals[loader], text)


def evaluation_label(trainer: Trainer) -> str:
    """Returns what the Trainer evaluates, such as `epoch 3/20 validation` or `test`."""
    if trainer.sanity_checking:
        return "validation before training"
    if trainer.state.fn is TrainerFn.FITTING:
        return f"{epoch_text(trainer)} validation"
    labels: dict[TrainerFn | None, str] = {TrainerFn.TESTING: "test", TrainerFn.PREDICTING: "prediction"}
    return labels.get(trainer.state.fn, "validation")


def evaluation_batches(trainer: Trainer) -> Sequence[float]:
    """Returns the number of batches of each loader in the current evaluation."""
    if trainer.sanity_checking:
        return trainer.num_sanity_val_batches
    if trainer.state.fn is TrainerFn.TESTING:
        return trainer.num_test_batches
    return trainer.num_predict_batches if trainer.state.fn is TrainerFn.PREDICTING else trainer.num_val_batches


def batch_text(batches: int, total: float) -> str:
    """Returns the number of batches as `batch 3/8`; without a known total as `batch 3`."""
    return f"batch {batches}/{total}" if isfinite(total) else f"batch {batches}"
