"""Rate of a counter over a recent interval. Does not import torch."""

from collections import deque

WINDOW_SECONDS = 30.0
ENTRY_SECONDS = 0.5


class RecentRate:
    """Rate at which a count has grown within `WINDOW_SECONDS`, or between the last two records if longer ago."""

    def __init__(self) -> None:
        self._records: deque[tuple[float, float]] = deque()
        self._last: tuple[float, float] | None = None

    def record(self, seconds: float, count: float) -> None:
        """Records the count at a time; the time must not decrease."""
        self._last = (seconds, count)
        records = self._records
        if not records or seconds - records[-1][0] >= ENTRY_SECONDS:
            records.append(self._last)
            while len(records) > 2 and seconds - records[1][0] >= WINDOW_SECONDS:
                records.popleft()

    @property
    def per_second(self) -> float | None:
        """The rate; None before the count has grown."""
        if self._last is None:
            return None
        seconds, count = (last - first for last, first in zip(self._last, self._records[0], strict=True))
        return count / seconds if seconds > 0 and count > 0 else None


def rate_text(per_second: float) -> str:
    """Returns a training speed as `710 samples/s`; below 10, it has one decimal."""
    return f"{per_second:,.0f} samples/s" if per_second >= 9.95 else f"{per_second:.1f} samples/s"
