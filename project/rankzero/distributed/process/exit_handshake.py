"""Distinguishes intended exits of local processes from unreported ones. Does not import torch.

Without the handshake, `os._exit(0)` in a user's code would look like the normal end of a run.
"""

import contextlib
import os

from rankzero.distributed.environments.launchers import local

REPORT = "RANKZERO_EXIT_REPORT"
"""Variable set for local processes: the file descriptor of the pipe on which a process reports its exit."""


def report_exit() -> None:
    """Reports that this process exits intentionally and has printed any error."""
    descriptor, watcher = os.environ.get(REPORT), os.environ.get(local.MARK)
    if descriptor and watcher == str(os.getppid()):  # False in child processes, which inherit the variables
        with contextlib.suppress(OSError):
            os.write(int(descriptor), b".")


class ExitHandshake:
    """Pipe on which one local process reports an intended exit to its parent."""

    def __init__(self) -> None:
        self._reading, self.writing = os.pipe()
        os.set_blocking(self._reading, False)

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that give the local process its end of the pipe."""
        return {REPORT: str(self.writing)}

    def is_there(self) -> bool:
        """Returns whether a process that has exited had reported its exit. Reads the report, so call this only once."""
        with contextlib.suppress(OSError):
            return os.read(self._reading, 1) == b"."
        return False

    def close(self) -> None:
        """Closes both ends of the pipe in this process."""
        for descriptor in (self._reading, self.writing):
            with contextlib.suppress(OSError):
                os.close(descriptor)
