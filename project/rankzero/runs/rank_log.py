"""Log of one rank, `logs/rank-000.log`, with crashes; and the check that all ranks see the folder of the run.

Does not import torch.
"""

import faulthandler
import logging
import os
import re
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO, cast

from typing_extensions import override

from rankzero.distributed.timers import TIMERS
from rankzero.messages import RequestError, print_error
from rankzero.runs.directory import RunDirectory, cannot_write_error

SHARED_FOLDER_ADVICE = "--root DIR, where DIR is on a file system that all hosts share"


def check_shared(run: RunDirectory) -> None:
    """Checks that this process sees the directory in which rank zero has begun an attempt.

    Raises:
        RequestError: This process sees another directory, or none.
    """

    def contains_attempt() -> bool:
        record = run.read("run.json")
        return not run.is_kept or (record.get("id") == run.id and len(record.get("attempts", ())) >= run.attempt)

    if not wait_until_visible(contains_attempt, run.path):
        root = run.path.parent
        folder = f"{root.absolute()}, in which rank zero has created the run {run.name}"
        raise RequestError(f"--root {root}", f"the host of this rank does not share {folder}", SHARED_FOLDER_ADVICE)


def wait_until_visible(is_visible: Callable[[], bool], folder: Path) -> bool:
    """Waits until this process sees what rank zero has written to a folder; returns False after a while."""
    deadline = time.monotonic() + TIMERS.shared_file
    while not is_visible():
        if time.monotonic() > deadline:
            return False
        time.sleep(TIMERS.poll)
        with suppress(OSError):
            list(folder.iterdir())  # lets NFS refresh its cache
    return True


SIGNALS = {
    "Segmentation fault": "SIGSEGV",
    "Bus error": "SIGBUS",
    "Aborted": "SIGABRT",
    "Floating point exception": "SIGFPE",
    "Floating-point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}
"""Maps faulthandler's description of a signal to the signal's name."""


class _LogFile(logging.FileHandler):
    """Log file that is created again if it was deleted."""

    def __init__(self, path: Path, on_recreated: Callable[[], None]) -> None:
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self._on_recreated = on_recreated

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # the folder cannot be created: the next line tries again
            deleted = cast(TextIO, self.stream)
            if os.fstat(deleted.fileno()).st_nlink == 0:
                # Without `parents`: the directory of a run that rank zero has removed must not appear again.
                Path(self.baseFilename).parent.mkdir(exist_ok=True)
                self.setStream(self._open())
                deleted.close()
                self._on_recreated()
        super().emit(record)

    @override
    def handleError(self, record: logging.LogRecord) -> None:
        """Does nothing: a full disk is reported elsewhere."""


logging.getLogger("rankzero").addHandler(logging.NullHandler())  # outside a run, errors must not go to stderr


class RankLog:
    """Writes what is logged to `logging.getLogger("rankzero")` to this rank's log, and crashes of the process too."""

    def __init__(self, run: RunDirectory, rank: int) -> None:
        self.run, self.rank = run, rank
        self.logger = logging.getLogger("rankzero")
        self._logs_crashes = False

    def create(self) -> None:
        """Creates the file in the directory in which rank zero has begun the attempt.

        Raises:
            RequestError: This process does not see that directory, or cannot write to it.
        """
        check_shared(self.run)
        try:
            self.run.log(self.rank).touch()
        except OSError as error:
            raise cannot_write_error(self.run.path, error) from None

    def open(self) -> None:
        """Begins to write."""
        self._has_warned = False
        self._handler = handler = _LogFile(self.run.log(self.rank), self._begin_again)
        origin = f"rank {self.rank} on {socket.gethostname()}".replace("%", "%%")
        handler.setFormatter(logging.Formatter(f"%(asctime)s {origin} %(levelname)s %(message)s"))
        self.logger.addHandler(handler)
        self._begin_to_log_crashes()
        self._settings = self.logger.level, self.logger.propagate
        self.logger.setLevel(logging.INFO)
        self.logger.propagate = False

    def close(self) -> None:
        """Ends writing, and restores the settings of the logger."""
        self._end_to_log_crashes()
        self.logger.removeHandler(self._handler)
        level, self.logger.propagate = self._settings
        self.logger.setLevel(level)
        with suppress(OSError):  # a full disk
            self._handler.close()

    def _begin_again(self) -> None:
        """Begins a new file after the log was deleted: crashes are written to it too, and it names the attempt."""
        self._end_to_log_crashes()
        self._begin_to_log_crashes()
        self.logger.warning("attempt %d: this log was deleted during the run: earlier lines are lost", self.run.attempt)
        if self.rank == 0 and not self._has_warned:
            self._has_warned = True
            folder = self.run.log(0).parent
            print_error(f"a log in {folder} was deleted during the run: its lines are lost, and training continues")

    def _begin_to_log_crashes(self) -> None:
        """Makes Python write the traceback of a crash to the log, unless the user has set PYTHONFAULTHANDLER."""
        if not faulthandler.is_enabled():
            faulthandler.enable(cast(TextIO, self._handler.stream))
            self._logs_crashes = True

    def _end_to_log_crashes(self) -> None:
        if self._logs_crashes:
            faulthandler.disable()
            self._logs_crashes = False

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
