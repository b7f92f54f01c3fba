"""A user's code that calls `os._exit` in the middle of a run: a failure like any other. Imports no torch.

`os._exit` skips all handlers, so the function itself is replaced while a run is under way. Processes that this one
forks (loader processes end by `os._exit`) are left alone, and so is code that leaves from C.
"""

import os
from collections.abc import Callable
from typing import NoReturn

LEAVE = os._exit
"""The function itself."""


class EarlyExit:
    """Replaces `os._exit` in this process until it is put back.

    Args:
        report: Called with the exit code, before the process leaves with 1.
    """

    def __init__(self, report: Callable[[int], None]) -> None:
        self.report, self.pid = report, os.getpid()

    def watch(self) -> None:
        """Replaces the function."""
        os._exit = self._exit

    def close(self) -> None:
        """Puts the function back."""
        if os._exit == self._exit:
            os._exit = LEAVE

    def _exit(self, status: int) -> NoReturn:
        if os.getpid() != self.pid:
            LEAVE(status)
        try:
            self.report(status)
        finally:
            LEAVE(1)
