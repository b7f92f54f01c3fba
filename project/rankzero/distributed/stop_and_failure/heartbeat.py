"""Reports what this rank's main thread is doing, so that rank zero can explain a hang. Does not import torch."""

from collections.abc import Callable
from time import monotonic

from rankzero.distributed.stop_and_failure.activity import CHECKPOINT, UNMONITORED, Activity
from rankzero.distributed.stop_and_failure.hang import PATIENCE, Status
from rankzero.distributed.stop_and_failure.stacks import (
    is_compiling,
    is_in_debugger,
    main_thread_frames,
    user_position,
)

DETAIL_SECONDS = 4.0
"""Age of a phase from which on a report contains the main thread's position; reading it takes about a millisecond."""


class Heartbeat:
    """Observes the activity of this rank from another thread.

    Args:
        activity: The activity of the main thread.
        timeout: `--hang_timeout`: seconds without progress after which a run hangs.
        collective_in_flight: Returns sequence number and description of the oldest collective that this rank has begun
            and that has not completed; None if there is none.
    """

    def __init__(
        self, activity: Activity, timeout: float, collective_in_flight: Callable[[], tuple[int, str] | None]
    ) -> None:
        self.activity, self.timeout, self.collective_in_flight = activity, timeout, collective_in_flight
        self._longest = 0.0
        self._last_visit, self._last_age = activity.since, 0.0

    def status(self) -> Status | None:
        """Returns the status of this rank; None while it takes part in no training.

        The limit of a phase is `timeout` plus the longest phase that has ended so far.
        """
        activity = self.activity
        phase, since, now = activity.phase, activity.since, monotonic()
        if since != self._last_visit:
            self._longest = max(self._longest, self._last_age)
        self._last_visit, self._last_age = since, now - since
        if phase in UNMONITORED:
            self._last_age = 0.0
            return None
        age = max(0.0, now - since)
        status = Status(activity.step, phase, age, self.timeout + self._longest, phase not in activity.seconds)
        return status if age < DETAIL_SECONDS else self._with_details(status)

    def _with_details(self, status: Status) -> Status:
        frames = main_thread_frames()
        limit = status.limit
        if is_in_debugger(frames):
            limit = None
        elif limit is not None and (status.phase == CHECKPOINT or is_compiling(frames)):
            limit *= PATIENCE
        sequence, waits_in = self.collective_in_flight() or (0, "")
        return status._replace(limit=limit, waits_in=waits_in, sequence=sequence, position=user_position(frames))
