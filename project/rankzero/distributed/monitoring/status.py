"""What a rank reports about itself to rank zero, and how often."""

from collections.abc import Callable
from functools import lru_cache
from time import monotonic
from typing import Any, NamedTuple

from rankzero.distributed.monitoring.activity import place_of_step
from rankzero.distributed.timers import TIMERS


class PauseDetector:
    """Notices that this process was stopped and runs again (Ctrl-Z, `scontrol suspend`).

    Time before the end of a pause must not count towards a hang.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock, self._resumed_at = clock, 0.0
        self._last_call = clock()

    def resumed_at(self) -> float:
        """Returns when the last pause ended, on the given clock; 0 without a pause. Call this with every heartbeat."""
        now = self._clock()
        if now - self._last_call > TIMERS.suspended:
            self._resumed_at = now
        self._last_call = now
        return self._resumed_at


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


MAX_REPORTS_PER_SECOND = 20
"""Answers per second that rank zero aims for; in very large runs it receives more."""


def report_interval(nodes: int) -> float:
    """Returns the seconds between two requests of rank zero for reports of all nodes."""
    return min(max(TIMERS.heartbeat, nodes / MAX_REPORTS_PER_SECOND), TIMERS.longest_report_interval)


def silence_seconds(interval: float) -> float:
    """Returns the seconds without a report after which a connected rank counts as blocked."""
    return TIMERS.silence + max(0.0, interval - TIMERS.heartbeat)


class ReportSchedule:
    """Decides whether a status of one rank is reported.

    Rank zero requests all statuses at regular intervals. The answers arrive together, which costs less CPU time than if
    they arrived one by one. A status that may become a hang, and the first one after it, are reported without a
    request, so that large runs, with their long intervals, notice a hang as quickly as small ones.
    """

    def __init__(self) -> None:
        self._was_urgent = False

    def is_due(self, status: Status | None, is_requested: bool) -> bool:
        """Returns whether to report a status (None outside training) now, which rank zero may have requested."""
        is_urgent = status is not None and status.is_urgent
        is_due = is_requested or is_urgent or self._was_urgent
        if is_due:
            self._was_urgent = is_urgent
        return is_due
