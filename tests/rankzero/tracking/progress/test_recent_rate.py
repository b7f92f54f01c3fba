import pytest

from rankzero.tracking.progress.recent_rate import RecentRate, rate_text


@pytest.mark.parametrize(
    ("records", "per_second"),
    [
        ([(second, 5 * min(second, 50) + 100 * max(0, second - 50)) for second in range(101)], 100),
        ([(600 * number, 1200 * number) for number in range(4)], 2),
    ],
    ids=["faster after 50 s", "records further apart than the interval"],
)
def test_only_the_recent_interval_counts(records, per_second):
    rate = RecentRate(window_seconds=10)
    for seconds, count in records:
        rate.record(seconds, count)
    assert rate.per_second == pytest.approx(per_second)


def test_no_rate_is_stated_before_the_count_has_grown():
    rate = RecentRate()
    rates = [rate.per_second]
    for record in ((3.0, 32), (3.0, 64), (3.1, 96)):
        rate.record(*record)
        rates.append(rate.per_second)
    assert rates == [None, None, None, pytest.approx(640)]


def test_a_fast_rate_has_no_decimals():
    texts = {0.25: "0.2 samples/s", 9.94: "9.9 samples/s", 9.96: "10 samples/s", 12_345.6: "12,346 samples/s"}
    assert {rate: rate_text(rate) for rate in texts} == texts
