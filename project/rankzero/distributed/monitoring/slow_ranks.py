"""Finds ranks that are slower than the others.

A step takes equally long on all ranks, because all wait for the slowest one. The time from the start of a step to the
first gradient shows which rank that is.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import median_low
from time import monotonic

SLOW_FACTOR = 1.5
"""A rank is slow if it takes at least this multiple of the median of all ranks."""

SLOW_SECONDS = 1e-3
"""A rank is slow only if it takes at least this much longer than the median; shorter differences are noise."""

MAX_REPORTS = 4
"""How many ranks that have become slow at the same time are described; the others are counted."""

PERSISTENCE_SECONDS = 10.0
"""How long a rank has to be slow before it is reported."""


class SlowRankDetector:
    """Knows the time to the first gradient of each rank.

    Attributes:
        reports: Rank -> description of each rank that has been reported.
    """

    def __init__(self, hosts: Sequence[str], clock: Callable[[], float] = monotonic) -> None:
        self.hosts, self._clock = hosts, clock
        self.reports: dict[int, str] = {}
        self._seconds: dict[int, float] = {}
        self._slow_since: dict[int, float] = {}

    def update(self, rank: int, seconds: float) -> None:
        """Records how long a rank takes from the start of a step to its first gradient; 0 if that is unknown."""
        if seconds:
            self._seconds[rank] = seconds
        else:
            self._seconds.pop(rank, None)

    def new_reports(self) -> list[str]:
        """Returns descriptions of ranks that have become slow since the last call; each rank is described once."""
        now, slow = self._clock(), slow_ranks(self._seconds)
        self._slow_since = {rank: self._slow_since.get(rank, now) for rank in slow}
        new_ranks = [
            rank
            for rank, since in self._slow_since.items()
            if now - since >= PERSISTENCE_SECONDS and rank not in self.reports
        ]
        for rank in new_ranks:
            self.reports[rank] = self._describe(rank)
        unnamed = len(new_ranks) - MAX_REPORTS
        others = [f"{unnamed} more ranks are slow"] if unnamed > 0 else []
        return [*(self.reports[rank] for rank in new_ranks[:MAX_REPORTS]), *others]

    def _describe(self, rank: int) -> str:
        host, others = self.hosts[rank], set(self.hosts) - {self.hosts[rank]}
        advice = f"to exclude the host under Slurm: --exclude={host}" if others else "see which programs run there"
        return (
            f"rank {rank} on {host} is slow: {1e3 * self._seconds[rank]:,.1f} ms from the start of a step to its first "
            f"gradient, and the median of all ranks is {1e3 * median_low(self._seconds.values()):,.1f} ms; {advice}"
        )


def slow_ranks(seconds: Mapping[int, float]) -> list[int]:
    """Returns the ranks that take much longer than the median of all ranks.

    Args:
        seconds: Rank -> seconds from the start of a step to the first gradient.
    """
    if len(seconds) < 2:
        return []
    median = median_low(seconds.values())
    return [
        rank
        for rank, value in sorted(seconds.items())
        if value >= SLOW_FACTOR * median and value - median >= SLOW_SECONDS
    ]
