"""What a rank reports about itself to rank zero. Does not import torch."""

from functools import lru_cache
from typing import Any, NamedTuple

from rankzero.distributed.monitoring.activity import place_of_step

_MAX_NUMBER = 1e15
"""Limit of the numbers in a message; larger ones, and NaN, are malformed."""


class Status(NamedTuple):
    """The state of a rank's main thread.

    Args:
        step: Number of completed optimizer steps.
        phase: The phase of the main thread, see `activity.py`.
        age: Seconds since the main thread entered the phase, or completed the last part of it.
        limit: Seconds that the phase may take; None without limit.
        may_take_longer: Whether the phase may take several times `limit` while no other rank waits for this one.
        waits_in: The collective in which this rank waits for other ranks; empty if there is none.
        sequence: Number of that collective, counted from the start of the run; 0 if it is unknown.
        position: The innermost line of the user's code; empty if it is unknown.
        first_gradient: Seconds from the start of a step to its first gradient; 0 if that is unknown.
    """

    step: int
    phase: str
    age: float
    limit: float | None
    may_take_longer: bool = False
    waits_in: str = ""
    sequence: int = 0
    position: str = ""
    first_gradient: float = 0.0

    @classmethod
    def from_message(cls, values: Any) -> "Status | None":
        """Returns the status in a rank's message; None outside training, and for a malformed message."""
        if not isinstance(values, list) or not _are_types_valid(tuple(map(type, values))):
            return None
        status = cls(*values)
        numbers = (status.step, status.age, status.limit or 0.0, status.sequence, status.first_gradient)
        return status if all(abs(number) < _MAX_NUMBER for number in numbers) else None

    @property
    def is_urgent(self) -> bool:
        """Whether the phase has taken so long that it may become a hang."""
        return self.is_overdue(0.5)

    @property
    def place(self) -> str:
        """Phase and step, such as `data wait at step 812`."""
        return place_of_step(self.phase, self.step)

    def is_overdue(self, factor: float = 1) -> bool:
        """Whether the phase has taken longer than its limit, multiplied by `factor`."""
        return self.limit is not None and self.age > self.limit * factor


@lru_cache(64)  # rank zero receives many messages with the same types
def _are_types_valid(types: tuple[type, ...]) -> bool:
    expected = (int, str, int | float, int | float | None, bool, str, int, str, int | float)
    return len(types) == len(expected) and all(map(issubclass, types, expected))
