import pytest

from rankzero.preflight.bandwidth import SIZES, step_seconds

ROWS = [{"bytes": 1 << 20, "seconds": 0.01}, {"bytes": 1 << 26, "seconds": 0.5}]


def test_sizes_range_from_1_kib_to_256_mib():
    assert SIZES[0] == 1 << 10 and SIZES[-1] == 1 << 28


@pytest.mark.parametrize(("count", "seconds"), [(1 << 20, 0.01), (1 << 27, 1.0), (1000, 0.01)])
def test_the_time_of_a_step_follows_from_the_nearest_size(count, seconds):
    assert step_seconds(count, ROWS) == pytest.approx(seconds)
