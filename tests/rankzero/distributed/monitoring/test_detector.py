import pytest

from rankzero.distributed.monitoring.detector import HangDetector
from rankzero.distributed.monitoring.status import Status
from rankzero.distributed.timers import TIMERS

STUCK = Status(5, "data wait", 6.0, 5.0)
WAITING = Status(5, "backward", 6.0, 5.0, waits_in="all_reduce of 9 values", sequence=5)


class Ranks:
    """A detector of hangs of ranks on the nodes n1, n2, ..., on a clock that the test advances."""

    def __init__(self, *statuses, **options):
        self.seconds = 0.0
        hosts = ["n1", "n2", "n3"][: len(statuses)]
        self.detector = HangDetector(hosts, TIMERS.silence, lambda: self.seconds, **options)
        self.new_hang, self.update = self.detector.new_hang, self.detector.update
        for rank, status in enumerate(statuses):
            self.update(rank, status)


def test_a_hang_is_described_once_until_there_is_progress_or_a_rank_leaves_training():
    ranks = Ranks(WAITING, STUCK)
    assert "rank 1 on n2 has been in data wait" in ranks.new_hang()
    assert ranks.new_hang() == ""
    ranks.update(1, STUCK._replace(age=0.0))
    assert ranks.new_hang() == ""
    ranks.update(1, STUCK)
    assert ranks.new_hang() and ranks.detector.last_place(1) == "data wait at step 5"
    for rank in (0, 1):
        ranks.update(rank, None)
    assert ranks.detector.last_place(1) == ranks.new_hang() == ""


@pytest.mark.parametrize(
    ("ages", "reports"),
    [
        ((4.0, 4.0), {0.0: "", 1.5: "for 6 s"}),
        ((2.6, 2.6), {8.0: ""}),  # a rank that may hang reports with every heartbeat, and others may have made progress
        ((6.0, 1.0), {5.0: ""}),
        ((3.5, 3.5), {3600.0: "", 3602.0: "rank 1 on n2"}),  # Ctrl-Z, fg
    ],
    ids=["two reports", "more than a heartbeat", "a short phase", "a pause of rank zero"],
)
def test_the_age_of_a_status_increases_by_one_heartbeat_at_most_without_a_report(ages, reports):
    ranks = Ranks(WAITING._replace(age=ages[0]), STUCK._replace(age=ages[1]))
    for seconds, text in reports.items():
        ranks.seconds = seconds
        found = ranks.new_hang()
        assert text in found and bool(found) == bool(text)


@pytest.mark.parametrize("leaders", [None, [0, 1, 1]], ids=["two nodes", "rank 2 reports through rank 1"])
def test_a_rank_that_stops_reporting_is_blocked_but_not_one_that_reports_through_it(leaders):
    silent = STUCK._replace(age=0.0)
    ranks = Ranks(WAITING, silent, silent, leader_of=leaders.__getitem__) if leaders else Ranks(WAITING, silent)
    for _ in range(4):
        ranks.seconds += 4.0
        ranks.update(0, WAITING)
        report = ranks.new_hang()
    assert report.startswith("rank 1 on n2 has not reported for 16 s") and "rank 2" not in report
