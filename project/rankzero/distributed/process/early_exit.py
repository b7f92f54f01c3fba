"""Reports a call of `os._exit` by the user's code in the middle of a run as a failure. Does not import torch.

`os._exit` skips all exit handlers, so the function itself is replaced during a run. Forked processes still
exit without a report, because loader processes exit by `os._exit`. An exit from C code is not detected.
"""

import os
from collections.abc import Callable
from typing import NoReturn

ORIGINAL_EXIT = os._exit
"""The original `os._exit`."""


class EarlyExit:
    """Replaces `os._exit` in this process between `install` and `close`.

    Args:
        report: Called with the exit code, before the process exits with code 1.
    """

    def __init__(self, report: Callable[[int], None]) -> None:
        self.report, self.pid = report, os.getpid()

    def install(self) -> None:
        """Replaces `os._exit`."""
        os._exit = self._exit

    def close(self) -> None:
        """Restores `os._exit`, unless other code has replaced it since."""
        if os._exit == self._exit:
            os._exit = ORIGINAL_EXIT

    def _exit(self, status: int) -> NoReturn:
        if os.getpid() != self.pid:
            ORIGINAL_EXIT(status)
        try:
            self.report(status)
        finally:
            ORIGINAL_EXIT(1)
