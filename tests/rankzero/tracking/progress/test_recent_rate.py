import pytest

from rankzero.tracking.progress.recent_rate import RecentRate, rate_text


def test_only_the_recent_interval_counts():
    rate = RecentRate(window_seconds=10)
    for second in range(101):
        rate.record(second, 5 * min(second, 50) + 100 * max(0, second - 50))
    assert rate.per_second == pytest.approx(100)


def test_records_further_apart_than_the_interval_give_a_rate():
    rate = RecentRate(window_seconds=10)
    for number in range(4):
        rate.record(number * 600, number * 1200)
    assert rate.per_second == pytest.approx(2)


def test_no_rate_is_stated_before_the_count_has_grown():
    rate = RecentRate()
    assert rate.per_second is None
    rate.record(3.0, 32)
    assert rate.per_second is None
    rate.record(3.0, 64)
    assert rate.per_second is None
    rate.record(3.1, 96)
    assert rate.per_second == pytest.approx(640)


def test_a_fast_rate_has_no_decimals():
    assert [rate_text(rate) for rate in (0.25, 9.94, 9.96, 12_345.6)] == [
        "0.2 samples/s",
        "9.9 samples/s",
        "10 samples/s",
        "12,346 samples/s",
    ]
