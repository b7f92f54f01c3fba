"""Collects the reports of all ranks on rank zero and notices a hang. Does not import torch."""

from collections.abc import Callable, Sequence
from time import monotonic

from rankzero.distributed.stop_and_failure.hang import SILENCE_SECONDS, Status, describe_hang


class HangDetector:
    """Knows the newest status of each rank.

    Args:
        hosts: Host of each rank.
        clock: Returns the time in seconds.
    """

    def __init__(self, hosts: Sequence[str], clock: Callable[[], float] = monotonic) -> None:
        self.hosts, self._clock = hosts, clock
        self._statuses: dict[int, tuple[Status, float]] = {}
        self._is_reported = False

    def update(self, rank: int, status: Status | None) -> None:
        """Records a rank's report; None if the rank takes part in no training at the moment."""
        if status is None:
            self._statuses.pop(rank, None)
        else:
            self._statuses[rank] = status, self._clock()

    def new_hang(self) -> str:
        """Returns the description of a hang that has begun since the last call; empty if there is none.

        A hang is described once. If the run makes progress again, the next hang is described too.
        """
        now = self._clock()
        silent = {rank: now - at for rank, (_, at) in self._statuses.items() if now - at > SILENCE_SECONDS}
        description = describe_hang({rank: status for rank, (status, _) in self._statuses.items()}, silent, self.hosts)
        is_new = bool(description) and not self._is_reported
        self._is_reported = bool(description)
        return description if is_new else ""

    def last_seen(self, rank: int) -> str:
        """Returns the step and phase of a rank's last report; empty if the rank took part in no training then."""
        if rank not in self._statuses:
            return ""
        status, at = self._statuses[rank]
        return f"last report {self._clock() - at:.0f} s before: step {status.step}, {status.phase}"
