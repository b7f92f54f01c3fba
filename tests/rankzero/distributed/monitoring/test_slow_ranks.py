import pytest

from rankzero.distributed.monitoring.slow_ranks import SlowRankDetector, slow_ranks


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        *[({}, []), ({0: 1.0}, []), ({0: 0.1, 1: 0.1}, []), ({0: 0.1, 1: 0.3}, [1]), ({0: 0.1, 1: 0.14}, [])],
        ({0: 1e-4, 1: 9e-4}, []),  # less than a millisecond
        *[({0: 0.3, 1: 0.1, 2: 0.1, 3: 0.1}, [0]), ({0: 0.3, 1: 0.3, 2: 0.1, 3: 0.1}, [0, 1])],
    ],
)
def test_ranks_far_above_the_median_are_slow(seconds, expected):
    assert slow_ranks(seconds) == expected


def test_a_rank_is_reported_once_after_it_has_been_slow_for_ten_seconds():
    clock = [0.0]
    detector = SlowRankDetector(["n1", "n2"], lambda: clock[0])
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


def test_a_rank_that_is_slow_only_at_times_or_without_measurement_is_not_reported():
    clock = [0.0]
    detector = SlowRankDetector(["n1", "n2"], lambda: clock[0])
    detector.update(0, 0.1)
    for second in range(60):
        clock[0] = second
        detector.update(1, 0.3 if second % 8 else 0.1)
        assert detector.new_reports() == []
    detector.update(1, 0.3)
    detector.update(1, 0.0)
    clock[0] = 80.0
    assert detector.new_reports() == []
