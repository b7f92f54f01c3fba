"""Time left of a run, from the measured durations of batches, validations and ends of epochs. Does not import torch."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from math import inf, isfinite

from rankzero.training.validations import ValidationSchedule

MIN_SECONDS = 1.0
"""Measured time that an estimate needs."""

WINDOW_SECONDS, WINDOW_COUNT = 300.0, 8
"""Older durations count less as soon as a phase has been measured for this time and this often."""


class Phase(Enum):
    """What a run spends its time on."""

    BATCHES = "training batches"
    VALIDATION = "a validation"
    EPOCH_END = "the end of an epoch, without its validation"


@dataclass(frozen=True)
class Limits(ValidationSchedule):
    """When a run ends, and when it validates.

    Attributes:
        epochs: Number of epochs; infinity without a limit.
        steps: Number of optimizer steps; infinity without a limit.
        validation_batches: Number of batches in a validation; infinity if unknown.
        seconds: Seconds until the time limit; infinity without a limit.
    """

    epochs: float = inf
    steps: float = inf
    validation_batches: float = inf
    seconds: float = inf


@dataclass(frozen=True)
class Position:
    """How far a run has come.

    Attributes:
        epochs: Number of ended epochs.
        batches: Number of batches done in the current epoch.
        total_batches: Number of batches done in all epochs.
        steps: Number of optimizer steps done.
        has_validated: Whether the validation that may be due after the last batch is done.
    """

    epochs: int
    batches: int
    total_batches: int
    steps: int
    has_validated: bool = True


class Pace:
    """Measures one attempt: the seconds of a batch, of a validation, and of the end of an epoch.

    The first batch is not measured, since it includes the start of loader processes and other preparations.
    """

    def __init__(self, position: Position, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first = self._last = self._last_step = position
        self._phase: Phase | None = None
        self._interrupted: Phase | None = None
        self._since = clock()
        self._measured_seconds = 0.0
        self._seconds = dict.fromkeys(Phase, 0.0)
        self._counts = dict.fromkeys(Phase, 0.0)

    def record(self, position: Position, is_last_batch: bool = False) -> None:
        """Measures the batches since the last call; after the last batch of an epoch, its end begins."""
        if self._phase is None:
            self._phase = Phase.BATCHES
        else:
            self._measure(position.total_batches - self._last.total_batches)
        if position.steps > self._last_step.steps:
            self._last_step = position
        self._last, self._since = position, self._clock()
        if is_last_batch:
            self._phase = Phase.EPOCH_END

    def begin_epoch(self) -> None:
        """Begins the next epoch."""
        if self._phase is Phase.EPOCH_END:
            self._measure(1)
            self._phase = Phase.BATCHES

    def begin_validation(self, position: Position) -> None:
        """Interrupts the batches or the end of an epoch by a validation."""
        if self._phase is Phase.BATCHES:
            self.record(position)
        else:
            self._measure(0)
        self._interrupted, self._phase = self._phase, Phase.VALIDATION

    def end_validation(self) -> None:
        """Continues with what the validation has interrupted."""
        self._measure(1)
        self._phase = self._interrupted

    def seconds_left(self, position: Position, limits: Limits) -> float | None:
        """Returns the seconds until the run ends; None if the run has no end, or if too little is known."""
        if not isfinite(min(limits.epochs, limits.steps)):
            return max(0.0, limits.seconds) if isfinite(limits.seconds) else None
        batches, batch_seconds = self._batches_left(position, limits), self._mean(Phase.BATCHES)
        if batches is None or batch_seconds is None:
            return None
        seconds = {
            Phase.BATCHES: batch_seconds,
            Phase.VALIDATION: self._mean(Phase.VALIDATION),
            Phase.EPOCH_END: self._mean(Phase.EPOCH_END) or 0.0,
        }
        if seconds[Phase.VALIDATION] is None:
            size = limits.validation_batches
            seconds[Phase.VALIDATION] = size * batch_seconds if isfinite(size) else 0.0
        counts = {
            Phase.BATCHES: batches,
            Phase.VALIDATION: self._validations_left(position, limits, batches),
            Phase.EPOCH_END: (position.batches + batches) // limits.epoch_batches,
        }
        left = sum(counts[phase] * (seconds[phase] or 0.0) for phase in Phase)
        if self._phase in (Phase.VALIDATION, Phase.EPOCH_END):
            left -= min(self._clock() - self._since, seconds[self._phase] or 0.0)
        return max(0.0, min(left, limits.seconds))

    def _measure(self, count: int) -> None:
        """Adds the time since the last call, and what was done in it, to the current phase."""
        now, phase = self._clock(), self._phase
        if phase is not None:
            self._seconds[phase] += now - self._since
            self._counts[phase] += count
            if self._seconds[phase] > WINDOW_SECONDS and self._counts[phase] > WINDOW_COUNT:
                self._seconds[phase] /= 2
                self._counts[phase] /= 2
            self._measured_seconds += now - self._since
        self._since = now

    def _mean(self, phase: Phase) -> float | None:
        """Returns the mean seconds of a phase; None before it was measured."""
        if not self._counts[phase] or self._measured_seconds < MIN_SECONDS:
            return None
        return self._seconds[phase] / self._counts[phase]

    def _batches_left(self, position: Position, limits: Limits) -> float | None:
        """Returns the number of batches until the run ends; None if it cannot be determined."""
        left = inf
        if isfinite(limits.steps):
            steps = self._last_step.steps - self._first.steps
            if steps <= 0:
                return None
            batches_per_step = (self._last_step.total_batches - self._first.total_batches) / steps
            left = (limits.steps - self._last_step.steps) * batches_per_step
            left -= position.total_batches - self._last_step.total_batches
        if isfinite(limits.epochs):
            if not isfinite(limits.epoch_batches):
                return None
            left = min(left, (limits.epochs - position.epochs) * limits.epoch_batches - position.batches)
        return max(0.0, left)

    def _validations_left(self, position: Position, limits: Limits, batches: float) -> float:
        """Returns the number of validations within the next `batches` batches, with one that is due now."""
        if limits.validates and limits.validation_interval is None:  # validations are due at intervals of time
            measured_batches = self._counts[Phase.BATCHES]
            return batches * self._counts[Phase.VALIDATION] / measured_batches if measured_batches else 0.0
        done, earlier_batches = position.batches, position.total_batches - position.batches
        start = done if position.has_validated else max(0, done - 1)
        return limits.count(position.epochs, earlier_batches, start, done + batches)
