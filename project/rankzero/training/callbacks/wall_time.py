"""Whether the time that is left is enough for the next steps and for saving what they learn. Imports no torch."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum

REMEMBERED = 32
"""How many steps of a kind are remembered: what has been slow once may be so again, but not for ever."""

UNMEASURED_SAVE_SECONDS = 5.0
"""What saving is taken to need before it has been measured."""


class Kind(Enum):
    """What belongs to a step beside itself."""

    PLAIN = "nothing"
    EPOCH = "the end of an epoch"
    VALIDATION = "a validation, and perhaps the end of an epoch"


class WallTime:
    """Decides from what was measured whether the next safe point can still be reached.

    Args:
        end: When the time is up, by the clock.
        margin_seconds: What must be left over.
        clock: Tells the time in seconds.

    Attributes:
        validation_guess: What a validation is taken to need before one has been measured, in seconds.
    """

    def __init__(self, end: float, margin_seconds: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.end, self.margin_seconds = end, margin_seconds
        self.validation_guess = 0.0
        self._clock = clock
        self._steps: dict[Kind, deque[float]] = {kind: deque(maxlen=REMEMBERED) for kind in Kind}
        self._longest_save: float | None = None

    @property
    def seconds_left(self) -> float:
        """The time that is left; below zero where it is up."""
        return self.end - self._clock()

    def note_step(self, seconds: float, kind: Kind) -> None:
        """Notes how long a step took, with what belonged to it, without saving."""
        self._steps[kind].append(seconds)

    def note_save(self, seconds: float) -> None:
        """Notes how long saving took."""
        self._longest_save = max(seconds, self._longest_save or 0.0)

    def is_over(self, next_steps: Sequence[Kind]) -> bool:
        """Whether the next steps and a save behind them may take longer than the time that is left."""
        return self.seconds_left < sum(map(self._step, next_steps)) + self.save_seconds + self.margin_seconds

    @property
    def save_seconds(self) -> float:
        """What a save is taken to need: twice the longest one, since file systems of clusters have slow moments."""
        return UNMEASURED_SAVE_SECONDS if self._longest_save is None else 2 * self._longest_save

    def _step(self, kind: Kind) -> float:
        """What a step is taken to need."""
        if self._steps[kind]:
            return max(self._steps[kind])
        if kind is Kind.VALIDATION:
            return self._step(Kind.EPOCH) + self.validation_guess
        return self._step(Kind.PLAIN) if kind is Kind.EPOCH else 0.0
