"""Collects the reports of all ranks on rank zero and notices a hang. Does not import torch."""

from collections.abc import Callable, Sequence
from time import monotonic

from rankzero.distributed.monitoring.activity import START
from rankzero.distributed.monitoring.diagnosis import describe_hang
from rankzero.distributed.monitoring.status import PauseDetector, Status
from rankzero.distributed.timers import TIMERS


class HangDetector:
    """Knows the last status of each rank.

    `leader_of` returns the rank that passes on the reports of a rank, or the rank itself.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        silence_seconds: float,
        clock: Callable[[], float] = monotonic,
        leader_of: Callable[[int], int] = lambda rank: rank,
    ) -> None:
        self.hosts, self.silence_seconds, self._clock, self._leader_of = hosts, silence_seconds, clock, leader_of
        self._statuses: dict[int, tuple[Status, float]] = {}  # the oldest report first
        self._starting: dict[int, Status] = {}
        self._urgent: set[int] = set()
        self._is_reported = False
        self._pauses = PauseDetector(clock)

    def update(self, rank: int, status: Status | None) -> None:
        """Records the report of a rank; None if the rank is not training."""
        self._statuses.pop(rank, None)
        self._starting.pop(rank, None)
        self._urgent.discard(rank)
        if status is not None and status.phase == START:
            self._starting[rank] = status
        elif status is not None:
            self._statuses[rank] = status, self._clock()
            if status.is_urgent:
                self._urgent.add(rank)

    def new_hang(self) -> str:
        """Returns the description of a hang that has begun since the last call; empty if there is none.

        Must be called with every heartbeat. A hang is described once. If the run makes progress again, the next hang is
        described too.
        """
        now, resumed_at = self._clock(), self._pauses.resumed_at()
        starting = self._starting.values()
        if len(starting) == len(self.hosts) and all(status.waits_in and status.is_overdue() for status in starting):
            is_new, self._is_reported = not self._is_reported, True
            return describe_hang(self._starting, {}, self.hosts) if is_new else ""
        oldest = next((time for _, time in self._statuses.values()), now)
        if not self._urgent and now - max(oldest, resumed_at) <= self.silence_seconds:
            self._is_reported = False
            return ""
        seconds = {rank: now - max(time, resumed_at) for rank, (_, time) in self._statuses.items()}
        silent = {rank: silence for rank, silence in seconds.items() if silence > self.silence_seconds}
        for rank in [rank for rank in silent if self._leader_of(rank) != rank and self._leader_of(rank) in silent]:
            del silent[rank], seconds[rank]  # its reports do not arrive, so its status is unknown
        statuses = {rank: self._statuses[rank][0] for rank in seconds}
        for rank, status in statuses.items():  # as if they made no progress since their reports
            if status.is_urgent or rank in silent:
                older = seconds[rank] if rank in silent else min(seconds[rank], TIMERS.heartbeat)
                statuses[rank] = status._replace(age=status.age + older)
        description = describe_hang(statuses, silent, self.hosts)
        is_new = bool(description) and not self._is_reported
        self._is_reported = bool(description)
        return description if is_new else ""

    def late_start(self) -> str:
        """Returns which rank the others wait for while Lightning prepares data and model; empty if there is none."""
        for rank, status in sorted(self._starting.items()):
            if not status.waits_in:
                position = f" ({status.position})" if status.position else ""
                return f"rank {rank} on {self.hosts[rank]} is preparing data and model{position}"
        return ""

    def last_place(self, rank: int) -> str:
        """Returns phase and step of a rank's last report; empty if the rank was not training."""
        return self._statuses[rank][0].place if rank in self._statuses else ""
