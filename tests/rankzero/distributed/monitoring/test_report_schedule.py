import pytest

from rankzero.distributed.monitoring.report_schedule import ReportSchedule, report_interval, silence_seconds
from rankzero.distributed.monitoring.status import Status
from rankzero.distributed.timers import TIMERS

QUICK = Status(5, "backward", 0.1, 300.0)
LONG = Status(5, "backward", 100.0, 300.0)
URGENT = Status(5, "backward", 160.0, 300.0)


@pytest.mark.parametrize("status", [QUICK, LONG, None, Status(5, "backward", 1e4, None)])
def test_a_usual_status_is_reported_on_request(status):
    schedule = ReportSchedule()
    assert [schedule.is_due(status, requested) for requested in (False, True, False, True)] == [False, True] * 2


def test_a_status_that_may_become_a_hang_and_the_next_one_are_reported_at_once():
    schedule = ReportSchedule()
    assert [schedule.is_due(status, False) for status in (QUICK, URGENT, URGENT, QUICK, QUICK)] == [
        *(False, True, True, True, False)
    ]


@pytest.mark.parametrize(("nodes", "seconds"), [(1, 2), (40, 2), (128, 6.4), (1200, 60), (32768, 60)])
def test_the_interval_grows_with_the_number_of_nodes_up_to_a_limit(nodes, seconds):
    assert report_interval(nodes) == seconds


def test_a_rank_may_miss_several_seconds_of_reports_beyond_an_interval():
    assert silence_seconds(2.0) == TIMERS.silence
    assert silence_seconds(60.0) > 60.0 + 9.0  # the watchdog acts within 9 s
