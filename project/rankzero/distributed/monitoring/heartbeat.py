"""Observes what this rank's main thread is doing, so that rank zero can describe a hang. Does not import torch."""

from collections.abc import Callable
from time import monotonic
from types import FrameType
from typing import NamedTuple

from rankzero.distributed.monitoring.activity import (
    BACKWARD,
    CHECKPOINT,
    DATA,
    END,
    SANITY_CHECK,
    START,
    VALIDATION,
    Activity,
)
from rankzero.distributed.monitoring.diagnosis import PATIENCE
from rankzero.distributed.monitoring.stacks import (
    current_user_position,
    is_compiling,
    is_in_debugger,
    main_thread_frames,
    waiting_function,
    worker_position,
)
from rankzero.distributed.monitoring.status import PauseDetector, Status

DETAIL_SECONDS = 4.0
"""Age of a phase after which a report contains details; determining them takes about a millisecond.

With a short `--hang_timeout`, half of it applies.
"""


class InFlight(NamedTuple):
    """What this rank has begun and not completed.

    Args:
        number: Number of the oldest collective among those of its process group, from 1; 0 without one.
        collective: Its description, such as `all_reduce of 421,642 values`; empty if it waits for no other rank.
        awaits_gpu: Whether the GPU still works on something that needs no other rank.
    """

    number: int = 0
    collective: str = ""
    awaits_gpu: bool = False


CollectiveInFlight = Callable[[], InFlight]
"""Returns what this rank has in flight. Raises NotImplementedError if torch does not record collectives."""


class Heartbeat:
    """Observes the activity of this rank from another thread."""

    def __init__(
        self,
        activity: Activity,
        timeout: float,
        collective_in_flight: CollectiveInFlight,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.activity, self.timeout, self._clock = activity, timeout, clock
        self.collective_in_flight = collective_in_flight
        self._pauses = PauseDetector(clock)
        self._longest = 0.0
        self._last_visit, self._last_age = activity.since, 0.0
        self._waits_in, self._waits_since = "", activity.since

    @property
    def limit(self) -> float:
        """Seconds that a phase may take: `timeout` plus the longest phase that has ended so far."""
        return self.timeout + self._longest

    def status(self) -> Status | None:
        """Returns the status of this rank; None after training, and at first while Lightning prepares it."""
        activity, resumed_at = self.activity, self._pauses.resumed_at()
        phase, since, now = activity.phase, activity.since, self._clock()  # in this order, see `Activity.enter`
        if since != self._last_visit:
            self._longest = max(self._longest, self._last_age)
        self._last_visit, self._last_age = since, max(0.0, now - max(since, resumed_at))
        if phase in (START, END):
            age, self._last_age = self._last_age, 0.0
            return self._while_starting(now) if phase == START and age >= DETAIL_SECONDS else None
        may_take_longer = activity.batches < 2 or phase in (SANITY_CHECK, VALIDATION)
        needs_details = self._last_age >= min(DETAIL_SECONDS, self.timeout / 2)
        gradient = activity.first_gradient
        status = Status(activity.step, phase, self._last_age, self.limit, may_take_longer, first_gradient=gradient)
        if not needs_details:
            return status
        try:
            return self._with_details(status)
        except Exception:  # an unexpected state of a process or of torch; the thread must keep reporting
            return status

    def _while_starting(self, now: float) -> Status:
        frames = main_thread_frames()
        waits_in = self._collective(START, frames).collective
        if waits_in != self._waits_in:
            self._waits_in, self._waits_since = waits_in, now
        age, position = now - self._waits_since, current_user_position(frames)
        return Status(0, START, age, self.timeout, waits_in=waits_in, position=position)

    def _with_details(self, status: Status) -> Status:
        frames = main_thread_frames()
        limit: float | None = self.limit
        if is_in_debugger(frames):
            limit = None
        elif status.phase == CHECKPOINT or is_compiling(frames):
            status, limit = status._replace(may_take_longer=False), self.limit * PATIENCE
        sequence, waits_in, awaits_gpu = self._collective(status.phase, frames)
        position = current_user_position(frames)
        if status.phase == DATA and not position and status.is_overdue(0.5):
            position = worker_position()
        if awaits_gpu and not waits_in:
            position += f"{', where ' * bool(position)}the CPU waits for the GPU"
        return status._replace(limit=limit, waits_in=waits_in, sequence=sequence, position=position)

    def _collective(self, phase: str, frames: list[FrameType]) -> InFlight:
        """Returns what this rank has in flight, with the place in which the main thread waits for other ranks."""
        try:
            found = self.collective_in_flight()
        except NotImplementedError:
            found = InFlight(collective="a collective" * (phase == BACKWARD))
        except Exception:  # such as an error of the GPU, which the main thread raises too
            found = InFlight()
        return found if found.number or found.collective else found._replace(collective=waiting_function(frames))
