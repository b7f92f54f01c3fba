import json
import math

import pytest

from rankzero.distributed.monitoring import hangs
from rankzero.distributed.monitoring.activity import SANITY_CHECK, START
from rankzero.distributed.monitoring.hangs import HangDetector, SlowRankDetector, Status, describe_hang
from rankzero.distributed.timers import TIMERS

HOSTS = ("n1", "n1", "n2", "n2")
GRADIENTS = {"waits_in": "all_reduce of 421 values", "sequence": 812}
REPORT = [1, "forward", 0, 1, False, "", 0, "", 0.0]
MALFORMED = [(0, "1"), (1, 2), (0, 10**400), (2, math.inf), (3, math.nan)]


def status(phase: str = "backward", age: float = 20.0, limit: float | None = 10.0, **values) -> Status:
    return Status(811, phase, age, limit, **values)


def described(*statuses: Status, silent: dict[int, float] | None = None) -> str:
    return describe_hang(dict(enumerate(statuses)), silent or {}, HOSTS[: len(statuses)])


def test_the_rank_that_waits_for_no_other_is_the_cause():
    assert described(status(SANITY_CHECK)) == "rank 0 on n1 has been in the sanity check before training for 20 s"
    waiting = status(**GRADIENTS)
    text = described(waiting, waiting, waiting, status("data wait", position="data.py:7 in __getitem__"))
    assert text == (
        "rank 3 on n2 has been in data wait for 20 s at step 811 (data.py:7 in __getitem__); "
        "ranks 0-2 in backward, waiting in all_reduce of 421 values"
    )


def test_neither_a_wait_for_a_rank_within_its_limit_nor_a_phase_without_limit_is_a_hang():
    assert described(status(**GRADIENTS), status("data wait", age=9.0)) == ""
    assert described(status(age=math.inf, limit=None), status(**GRADIENTS)) == ""


def test_a_long_first_phase_is_a_hang_after_five_limits_or_if_another_rank_waits_for_it_too_long():
    first = status("forward", age=40.0, may_take_longer=True)
    assert described(first, first) == ""
    assert "rank 0 on n1 has been in forward for 51 s" in described(first._replace(age=51.0), first)
    first = first._replace(age=20.0)
    assert described(first, status(age=9.0, **GRADIENTS)) == ""
    assert described(first, status(age=11.0, **GRADIENTS)).startswith("rank 0 on n1 has been in forward")


def test_a_rank_that_waits_for_ranks_outside_training_is_a_hang():
    text = describe_hang({0: status(position="train.py:9 in training_step", **GRADIENTS)}, {}, ("n1", "n2", "n2"))
    assert text == (
        "rank 0 in backward, waiting in all_reduce of 421 values (train.py:9 in training_step), for ranks 1-2, "
        "which are not training"
    )


def test_before_training_the_rank_that_waits_for_no_other_is_late_and_this_is_no_hang():
    detector = HangDetector(HOSTS, TIMERS.silence)
    detector.update(0, status(START, 1e6, None, waits_in="barrier"))
    assert detector.late_start() == ""
    detector.update(1, status(START, 12.0, None, position="data.py:7 in prepare_data"))
    assert detector.late_start() == "rank 1 on n1 is preparing data and model (data.py:7 in prepare_data)"
    assert detector.new_hang() == detector.last_place(1) == ""
    detector.update(1, None)
    assert detector.late_start() == ""


def test_before_training_ranks_that_all_wait_too_long_hang():
    detector = HangDetector(HOSTS[:2], TIMERS.silence)
    detector.update(0, status(START, 20.0, waits_in="barrier"))
    detector.update(1, status(START, 9.0, waits_in="all_gather_object"))
    assert detector.new_hang() == ""
    detector.update(1, status(START, 11.0, waits_in="all_gather_object", position="data.py:7 in setup"))
    assert detector.new_hang() == (
        "the ranks wait for one another in different collectives: "
        "rank 1 in start, waiting in all_gather_object (data.py:7 in setup); rank 0 in start, waiting in barrier"
    )
    assert detector.new_hang() == ""


def test_all_ranks_in_the_same_collective_suggest_the_network():
    text = described(*[status(**GRADIENTS)] * 4)
    assert text.startswith("all ranks have been waiting in the same collective for 20 s: ranks 0-3 in backward")
    assert text.endswith("check the network of n1, n2")
    queued = {**GRADIENTS, "waits_in": "all_reduce of 421 values or for a kernel before it"}
    assert described(*[status(**queued)] * 4).endswith("check the network and the GPUs of n1, n2")


def test_a_rank_without_reports_is_the_cause_once_its_limit_has_passed():
    waiting = status(**GRADIENTS)
    assert described(waiting, status("forward", age=9.0), silent={1: 9.0}) == ""
    assert described(waiting, status("forward", age=30.0), silent={1: 30.0}).startswith(
        "rank 1 on n1 has not reported for 30 s, since forward at step 811: its Python interpreter "
        "is blocked or suspended"
    )


@pytest.mark.parametrize(
    "values",
    [
        *(None, [], "x", [1], {"step": 1}),
        *([*REPORT[:index], value, *REPORT[index + 1 :]] for index, value in MALFORMED),
    ],
)
def test_a_malformed_report_is_ignored(values):
    assert Status.from_message(values) is None
    expected = status("data wait", limit=None, position="x.py:1 in f")
    assert Status.from_message(json.loads(json.dumps(expected))) == expected


def test_ranks_are_listed_as_ranges_and_a_message_names_four_ranks_and_counts_the_others():
    ranges = {(3,): "rank 3", (0, 1, 2, 4, 5, 7): "ranks 0-2, 4-5, 7", (1, 0): "ranks 0-1"}
    assert {ranks: hangs.ranks_text(ranks) for ranks in ranges} == ranges
    text = describe_hang(dict.fromkeys(range(9), status("data wait")), {}, ["n1"] * 9)
    assert text.count("rank ") == 4 and text.endswith("; and 5 more ranks")


STUCK = Status(5, "data wait", 6.0, 5.0)
WAITING = Status(5, "backward", 6.0, 5.0, waits_in="all_reduce of 9 values", sequence=5)


@pytest.fixture
def clock(monkeypatch):
    """The time that the detectors see, in a list."""
    seconds = [0.0]
    monkeypatch.setattr(hangs, "monotonic", lambda: seconds[0])
    return seconds


def detector_of(*statuses, **options):
    """Returns a detector of hangs of ranks on the nodes n1, n2, ..., after these reports."""
    detector = HangDetector(["n1", "n2", "n3"][: len(statuses)], TIMERS.silence, **options)
    for rank, status in enumerate(statuses):
        detector.update(rank, status)
    return detector


def test_a_hang_is_described_once_until_there_is_progress_or_a_rank_leaves_training():
    ranks = detector_of(WAITING, STUCK)
    assert "rank 1 on n2 has been in data wait" in ranks.new_hang()
    assert ranks.new_hang() == ""
    ranks.update(1, STUCK._replace(age=0.0))
    assert ranks.new_hang() == ""
    ranks.update(1, STUCK)
    assert ranks.new_hang() and ranks.last_place(1) == "data wait at step 5"
    for rank in (0, 1):
        ranks.update(rank, None)
    assert ranks.last_place(1) == ranks.new_hang() == ""


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
def test_the_age_of_a_status_increases_by_one_heartbeat_at_most_without_a_report(clock, ages, reports):
    ranks = detector_of(WAITING._replace(age=ages[0]), STUCK._replace(age=ages[1]))
    for seconds, text in reports.items():
        clock[0] = seconds
        found = ranks.new_hang()
        assert text in found and bool(found) == bool(text)


@pytest.mark.parametrize("leaders", [None, [0, 1, 1]], ids=["two nodes", "rank 2 reports through rank 1"])
def test_a_rank_that_stops_reporting_is_blocked_but_not_one_that_reports_through_it(clock, leaders):
    silent = STUCK._replace(age=0.0)
    options = {"leader_of": leaders.__getitem__} if leaders else {}
    ranks = detector_of(WAITING, silent, *[silent] * bool(leaders), **options)
    for _ in range(4):
        clock[0] += 4.0
        ranks.update(0, WAITING)
        report = ranks.new_hang()
    assert report.startswith("rank 1 on n2 has not reported for 16 s") and "rank 2" not in report


def test_ranks_far_above_the_median_are_slow():
    slow = {(): [], (1.0,): [], (0.1, 0.1): [], (0.1, 0.3): [1], (0.1, 0.14): []}
    slow |= {(1e-4, 9e-4): [], (0.3, 0.1, 0.1, 0.1): [0], (0.3, 0.3, 0.1, 0.1): [0, 1]}  # one is below a millisecond
    assert {seconds: hangs.slow_ranks(dict(enumerate(seconds))) for seconds in slow} == slow


def test_a_rank_is_reported_once_after_it_has_been_slow_for_ten_seconds(clock):
    detector = SlowRankDetector(["n1", "n2"])
    detector.update(0, 0.1)
    detector.update(1, 0.3)
    assert detector.new_reports() == []
    clock[0] = 10.0
    assert detector.new_reports() == [
        "rank 1 on n2 is slow: 300.0 ms from the start of a step to its first gradient, and the median of all ranks is "
        "100.0 ms; to exclude the host under Slurm: --exclude=n2"
    ]
    clock[0] = 60.0
    assert detector.new_reports() == []
    assert list(detector.reports) == [1]


def test_a_rank_that_is_slow_only_at_times_or_without_measurement_is_not_reported(clock):
    detector = SlowRankDetector(["n1", "n2"])
    detector.update(0, 0.1)
    for second in range(60):
        clock[0] = second
        detector.update(1, 0.3 if second % 8 else 0.1)
        assert detector.new_reports() == []
    detector.update(1, 0.3)
    detector.update(1, 0.0)
    clock[0] = 80.0
    assert detector.new_reports() == []
