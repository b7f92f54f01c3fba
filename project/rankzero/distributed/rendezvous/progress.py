"""Progress of a wait for other processes."""

import math
import time
from collections.abc import Callable

from rankzero.distributed.timers import TIMERS
from rankzero.messages import print_error


class Progress:
    """Reports at intervals which processes or ranks a process is waiting for."""

    def __init__(self, timeout: float) -> None:
        self.started = self.printed_at = time.monotonic()
        self.timeout = timeout

    def print_if_due(self, describe: Callable[[], str]) -> None:
        """Prints a line if `TIMERS.progress` has passed since the last one; `describe` returns its text, or none."""
        now = time.monotonic()
        if now - self.printed_at > TIMERS.progress and (text := describe()):
            self.printed_at = now
            remaining = self.started + self.timeout - now
            limit = f"; giving up in {remaining:.0f} s" if remaining < math.inf else ""
            print_error(f"waiting since {now - self.started:.0f} s: {text}{limit}")
