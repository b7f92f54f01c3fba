"""Distinguishes intended exits of processes from unreported ones.

Local processes report an intended exit to their parent; otherwise `os._exit(0)` in a user's code would look like the
normal end of a run. During a run, `os._exit` itself is replaced, since it skips all exit handlers. Forked processes
still exit without a report, because loader processes exit by `os._exit`. An exit from C code is not detected.
"""

import contextlib
import os
from collections.abc import Callable
from typing import NoReturn

from rankzero.distributed.environments.launchers import local

REPORT_FD = "RANKZERO_EXIT_REPORT"
"""Variable set for local processes: the file descriptor of the pipe on which a process reports its exit."""


def report_exit() -> None:
    """Reports that this process exits intentionally and has printed any error."""
    descriptor, supervisor_pid = os.environ.get(REPORT_FD), os.environ.get(local.SUPERVISOR_PID)
    if descriptor and supervisor_pid == str(os.getppid()):  # False in child processes, which inherit the variables
        with contextlib.suppress(OSError):
            os.write(int(descriptor), b".")


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
