"""Log of one rank: `logs/rank-000.log` in the directory of the run. Does not import torch."""

import logging
import socket
from contextlib import suppress
from typing import TextIO, cast

from rankzero.runs.crash_log import CrashLog
from rankzero.runs.directory import RunDirectory


class RankLog:
    """Writes what is logged to `logging.getLogger("rankzero")` to this rank's log, and crashes of the process too.

    Args:
        run: Directory of the run, whose attempt has begun.
        rank: Rank of this process.
    """

    def __init__(self, run: RunDirectory, rank: int) -> None:
        self.run, self.rank = run, rank
        self.logger = logging.getLogger("rankzero")
        self._crash_log = CrashLog(run)

    def open(self) -> None:
        """Begins to write."""
        self._handler = handler = logging.FileHandler(self.run.log(self.rank))
        handler.handleError = lambda record: None  # type: ignore[method-assign]  # a full disk is reported elsewhere
        origin = f"rank {self.rank} on {socket.gethostname()}".replace("%", "%%")
        handler.setFormatter(logging.Formatter(f"%(asctime)s {origin} %(levelname)s %(message)s"))
        self.logger.addHandler(handler)
        self._crash_log.enable(cast(TextIO, handler.stream))
        self._settings = self.logger.level, self.logger.propagate
        self.logger.setLevel(logging.INFO)
        self.logger.propagate = False

    def close(self) -> None:
        """Ends writing, and restores the settings of the logger."""
        self._crash_log.disable()
        self.logger.removeHandler(self._handler)
        level, self.logger.propagate = self._settings
        self.logger.setLevel(level)
        with suppress(OSError):  # a full disk
            self._handler.close()

    def describe_crash(self, rank: int) -> str:
        """Returns how a rank ended if its log contains a crash of this attempt; otherwise an empty string."""
        return self._crash_log.describe_crash(rank)
