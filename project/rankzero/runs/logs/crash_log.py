"""Tracebacks of ranks killed by SIGSEGV, SIGBUS, SIGABRT, SIGFPE or SIGILL. Does not import torch."""

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
"""Maps faulthandler's description of a signal to the signal's name."""


class CrashLog:
    """Log of a crash: makes Python write the traceback to this rank's log, and finds it there.

    Args:
        run: Directory of the run, whose attempt has begun.
    """

    def __init__(self, run: RunDirectory) -> None:
        self.run, self._is_enabled = run, False

    def enable(self, log: TextIO) -> None:
        """Enables faulthandler, unless the user has enabled it already (PYTHONFAULTHANDLER)."""
        if not faulthandler.is_enabled():
            faulthandler.enable(log)
            self._is_enabled = True

    def disable(self) -> None:
        """Disables faulthandler. Call this before the log is closed."""
        if self._is_enabled:
            faulthandler.disable()
            self._is_enabled = False

    def describe_crash(self, rank: int) -> str:
        """Returns how a rank ended if its log contains a crash of this attempt; otherwise an empty string."""
        log, crash, in_this_attempt = self.run.log(rank), None, False
        try:
            with log.open(errors="replace") as file:
                for line in file:
                    if f" attempt {self.run.attempt}: " in line:
                        in_this_attempt, crash = True, None
                    elif in_this_attempt and crash is None:
                        crash = re.match("Fatal Python error: (.+)", line)
        except OSError:
            return ""
        return f"was killed by {SIGNALS.get(crash[1], crash[1])}, see {log}" if crash else ""
