from rankzero.distributed.monitoring.report_schedule import ReportSchedule, report_interval, silence_seconds
from rankzero.distributed.monitoring.status import Status
from rankzero.distributed.timers import TIMERS

QUICK = Status(5, "backward", 0.1, 300.0)
URGENT = Status(5, "backward", 160.0, 300.0)


def test_a_status_is_reported_on_request_or_at_once_with_the_next_one_if_it_may_become_a_hang():
    for status in (QUICK, Status(5, "backward", 100.0, 300.0), None, Status(5, "backward", 1e4, None)):
        schedule = ReportSchedule()
        assert [schedule.is_due(status, requested) for requested in (False, True, False, True)] == [False, True] * 2
    schedule = ReportSchedule()
    due = [schedule.is_due(status, False) for status in (QUICK, URGENT, URGENT, QUICK, QUICK)]
    assert due == [False, True, True, True, False]


def test_the_interval_grows_with_the_nodes_up_to_a_limit_and_a_rank_may_miss_some_seconds_of_reports():
    seconds = {1: 2, 40: 2, 128: 6.4, 1200: 60, 32768: 60}
    assert {nodes: report_interval(nodes) for nodes in seconds} == seconds
    assert silence_seconds(2.0) == TIMERS.silence
    assert silence_seconds(60.0) > 60.0 + 9.0  # the watchdog acts within 9 s
