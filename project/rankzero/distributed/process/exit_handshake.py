"""Distinguishes intended exits of local processes from unreported ones. Does not import torch.

Without the handshake, `os._exit(0)` in a user's code would look like the normal end of a run.
"""

import contextlib
import os

from rankzero.distributed.environments.launchers import local

REPORT_FD = "RANKZERO_EXIT_REPORT"
"""Variable set for local processes: the file descriptor of the pipe on which a process reports its exit."""


def report_exit() -> None:
    """Reports that this process exits intentionally and has printed any error."""
    descriptor, supervisor_pid = os.environ.get(REPORT_FD), os.environ.get(local.SUPERVISOR_PID)
    if descriptor and supervisor_pid == str(os.getppid()):  # False in child processes, which inherit the variables
        with contextlib.suppress(OSError):
            os.write(int(descriptor), b".")


class ExitHandshake:
    """Pipe on which one local process reports an intended exit to its parent."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that give the local process its end of the pipe."""
        return {REPORT_FD: str(self.write_end)}

    def was_received(self) -> bool:
        """Returns whether a process that has exited had reported its exit. Reads the report, so call this only once."""
        with contextlib.suppress(OSError):
            return os.read(self._read_end, 1) == b"."
        return False

    def close(self) -> None:
        """Closes both ends of the pipe in this process."""
        for descriptor in (self._read_end, self.write_end):
            with contextlib.suppress(OSError):
                os.close(descriptor)
