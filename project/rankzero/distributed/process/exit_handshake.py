"""Distinguishes intended exits of local processes from unreported ones. Imports no torch.

Without this, `os._exit(0)` in a user's code would pass for the end of the run.
"""

import contextlib
import os

from rankzero.distributed.environments.launchers import local

REPORT = "RANKZERO_EXIT_REPORT"
"""Set for the processes that we start: the file descriptor to write to."""


def report_exit() -> None:
    """Reports that this process exits intentionally and has printed any error."""
    descriptor, watcher = os.environ.get(REPORT), os.environ.get(local.MARK)
    if descriptor and watcher == str(os.getppid()):  # and not of a process that this one has started in turn
        with contextlib.suppress(OSError):
            os.write(int(descriptor), b".")


class ExitHandshake:
    """The watching process's end, for one process that it starts."""

    def __init__(self) -> None:
        self._reading, self.writing = os.pipe()
        os.set_blocking(self._reading, False)

    @property
    def variables(self) -> dict[str, str]:
        """What the process finds its end by."""
        return {REPORT: str(self.writing)}

    def is_there(self) -> bool:
        """Whether the process, which has ended, had reported that. To be asked once."""
        with contextlib.suppress(OSError):
            return os.read(self._reading, 1) == b"."
        return False

    def close(self) -> None:
        """Closes what this process holds."""
        for descriptor in (self._reading, self.writing):
            with contextlib.suppress(OSError):
                os.close(descriptor)
