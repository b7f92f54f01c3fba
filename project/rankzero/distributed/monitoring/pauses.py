"""Notices that this process was stopped and runs again (Ctrl-Z, `scontrol suspend`). Does not import torch."""

from collections.abc import Callable
from time import monotonic

from rankzero.distributed.timers import TIMERS


class PauseDetector:
    """Notices pauses of this process; time before the end of a pause must not count towards a hang."""

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
