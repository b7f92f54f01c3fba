"""Decides whether the time left suffices for the next steps and a save. Does not import torch."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum

REMEMBERED_STEPS = 32
"""Number of recent steps of each kind to remember. The slowest is the estimate, until it is no longer among them."""

UNMEASURED_SAVE_SECONDS = 5.0
"""Estimate for a save before one has been measured."""


class StepKind(Enum):
    """Kinds of steps, by what a step includes in addition to its batches."""

    PLAIN = "nothing"
    EPOCH = "the end of an epoch"
    VALIDATION = "a validation, and perhaps the end of an epoch"


class WallTime:
    """Decides from measured durations whether the next steps and a save fit into the time left.

    Args:
        end: Time of `clock` at which the limit is reached, in seconds.
        margin_seconds: Seconds that must remain.
        clock: Returns the current time in seconds.

    Attributes:
        validation_guess: Estimate for a validation before one has been measured, in seconds.
    """

    def __init__(self, end: float, margin_seconds: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.end, self.margin_seconds = end, margin_seconds
        self.validation_guess = 0.0
        self._clock = clock
        self._steps: dict[StepKind, deque[float]] = {kind: deque(maxlen=REMEMBERED_STEPS) for kind in StepKind}
        self._longest_save: float | None = None

    @property
    def seconds_left(self) -> float:
        """Seconds until the limit; negative after the limit."""
        return self.end - self._clock()

    def note_step(self, seconds: float, kind: StepKind) -> None:
        """Records the seconds of a step, including everything that belongs to its kind, but no save."""
        self._steps[kind].append(seconds)

    def note_save(self, seconds: float) -> None:
        """Records the seconds of a save."""
        self._longest_save = max(seconds, self._longest_save or 0.0)

    def is_over(self, next_steps: Sequence[StepKind]) -> bool:
        """Whether the next steps and a save after them may take longer than the time left."""
        return self.seconds_left < sum(map(self._step, next_steps)) + self.save_seconds + self.margin_seconds

    @property
    def save_seconds(self) -> float:
        """Estimate for a save: twice the longest one, since cluster file systems are slow at times."""
        return UNMEASURED_SAVE_SECONDS if self._longest_save is None else 2 * self._longest_save

    def _step(self, kind: StepKind) -> float:
        """Returns the estimated seconds of a step."""
        if self._steps[kind]:
            return max(self._steps[kind])
        if kind is StepKind.VALIDATION:
            return self._step(StepKind.EPOCH) + self.validation_guess
        return self._step(StepKind.PLAIN) if kind is StepKind.EPOCH else 0.0
