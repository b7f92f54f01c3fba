from rankzero.distributed.monitoring.detector import HangDetector
from rankzero.distributed.monitoring.status import Status
from rankzero.distributed.timers import TIMERS

STUCK = Status(5, "data wait", 6.0, 5.0)
WAITING = Status(5, "backward", 6.0, 5.0, waits_in="all_reduce of 9 values", sequence=5)


class Clock:
    """A clock that the test advances."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


def detector(*statuses):
    clock = Clock()
    found = HangDetector(["n1", "n2", "n3"][: len(statuses)], TIMERS.silence, clock)
    for rank, status in enumerate(statuses):
        found.update(rank, status)
    return found, clock


def test_a_hang_is_described_once():
    found, _ = detector(WAITING, STUCK)
    assert "rank 1 on n2 has been in data wait" in found.new_hang()
    assert found.new_hang() == ""


def test_the_next_hang_is_described_after_progress():
    found, _ = detector(WAITING, STUCK)
    assert found.new_hang()
    found.update(1, STUCK._replace(age=0.0))
    assert found.new_hang() == ""
    found.update(1, STUCK)
    assert found.new_hang()


def test_the_age_of_a_detailed_status_increases_between_reports():
    found, clock = detector(WAITING._replace(age=4.0), STUCK._replace(age=4.0))
    assert found.new_hang() == ""
    clock.seconds = 1.5
    assert "for 6 s" in found.new_hang()


def test_a_status_ages_by_one_heartbeat_at_most_without_a_report():
    """A rank that may hang reports with every heartbeat; another one may have made progress since its report."""
    found, clock = detector(WAITING._replace(age=2.6), STUCK._replace(age=2.6))
    clock.seconds = 8.0
    assert found.new_hang() == ""


def test_a_short_phase_is_no_hang_before_the_next_report():
    found, clock = detector(WAITING, STUCK._replace(age=1.0))
    clock.seconds = 5.0
    assert found.new_hang() == ""


def test_a_rank_that_stops_reporting_is_blocked():
    found, clock = detector(WAITING, STUCK._replace(age=0.0))
    for _ in range(4):
        clock.seconds += 4.0
        found.update(0, WAITING)
        report = found.new_hang()
    assert report.startswith("rank 1 on n2 has not reported for 16 s")


def test_a_pause_of_rank_zero_does_not_count_towards_a_hang():
    found, clock = detector(WAITING._replace(age=3.5), STUCK._replace(age=3.5))
    clock.seconds = 3600.0  # Ctrl-Z, fg
    assert found.new_hang() == ""
    clock.seconds += 2.0
    assert found.new_hang()


def test_a_rank_outside_training_is_forgotten():
    found, _ = detector(STUCK)
    assert found.last_place(0) == "data wait at step 5"
    found.update(0, None)
    assert found.last_place(0) == found.new_hang() == ""


def test_only_the_leader_of_a_silent_node_is_named():
    """Ranks 1 and 2 report through rank 1, which is blocked; rank 2 waits for it."""
    clock = Clock()
    found = HangDetector(["n1", "n2", "n2"], TIMERS.silence, clock, leader_of=[0, 1, 1].__getitem__)
    for rank in (1, 2):
        found.update(rank, STUCK._replace(age=0.0))
    for _ in range(4):
        clock.seconds += 4.0
        found.update(0, WAITING)
        report = found.new_hang()
    assert report.startswith("rank 1 on n2 has not reported for 16 s") and "rank 2" not in report
