"""Tracebacks of ranks that a signal ends (SIGSEGV, SIGBUS, SIGABRT, SIGFPE, SIGILL), and what they say. No torch."""

import faulthandler
import re
from typing import TextIO

from rankzero.runs.directory import RunDirectory

SIGNALS = {
    "Segmentation fault": "SIGSEGV",
    "Bus error": "SIGBUS",
    "Aborted": "SIGABRT",
    "Floating point exception": "SIGFPE",
    "Floating-point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}
"""What faulthandler calls a signal -> its name."""


class CrashLog:
    """Has Python write the traceback of a crash to the log of this rank.

    Args:
        run: The run, whose attempt has begun.
    """

    def __init__(self, run: RunDirectory) -> None:
        self.run, self._enabled = run, False

    def enable(self, log: TextIO) -> None:
        """Begins, unless the user's own settings say where tracebacks go (PYTHONFAULTHANDLER)."""
        if not faulthandler.is_enabled():
            faulthandler.enable(log)
            self._enabled = True

    def disable(self) -> None:
        """Ends; to be called before the log is closed."""
        if self._enabled:
            faulthandler.disable()
            self._enabled = False

    def how_ended(self, rank: int) -> str:
        """Describes how a rank ended, if its log holds a crash; otherwise empty."""
        log, crash, started = self.run.log(rank), None, False
        try:
            with log.open(errors="replace") as file:
                for line in file:
                    if f" attempt {self.run.attempt}: " in line:
                        started, crash = True, None
                    elif started and crash is None:
                        crash = re.match("Fatal Python error: (.+)", line)
        except OSError:
            return ""
        return f"was ended by {SIGNALS.get(crash[1], crash[1])}, see {log}" if crash else ""
