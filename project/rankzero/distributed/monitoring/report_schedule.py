"""How often the ranks report their status to rank zero. Does not import torch."""

from rankzero.distributed.monitoring.status import Status
from rankzero.distributed.timers import TIMERS

MAX_REPORTS_PER_SECOND = 20
"""Answers per second that rank zero aims for; in very large runs it receives more."""


def report_interval(nodes: int) -> float:
    """Returns the seconds between two requests of rank zero for reports of all nodes."""
    return min(max(TIMERS.heartbeat, nodes / MAX_REPORTS_PER_SECOND), TIMERS.longest_report_interval)


def silence_seconds(interval: float) -> float:
    """Returns the seconds without a report after which a connected rank counts as blocked."""
    return TIMERS.silence + max(0.0, interval - TIMERS.heartbeat)


class ReportSchedule:
    """Decides whether a status of one rank is reported.

    Rank zero requests all statuses at regular intervals. The answers arrive together, which costs less CPU time than if
    they arrived one by one. A status that may become a hang, and the first one after it, are reported without a
    request, so that large runs, with their long intervals, notice a hang as quickly as small ones.
    """

    def __init__(self) -> None:
        self._was_urgent = False

    def is_due(self, status: Status | None, is_requested: bool) -> bool:
        """Returns whether to report a status now.

        Args:
            status: The status; None outside training.
            is_requested: Whether rank zero has requested it.
        """
        is_urgent = status is not None and status.is_urgent
        is_due = is_requested or is_urgent or self._was_urgent
        if is_due:
            self._was_urgent = is_urgent
        return is_due
