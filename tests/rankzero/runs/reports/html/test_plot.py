import math
from itertools import product

import pytest

from rankzero.runs.reports.html import plot
from rankzero.runs.reports.html.plot import HEIGHT, WIDTH, Scale, mapped_ticks, paths, step_scale, value_scale

UNIT = Scale(0.0, 1.0)


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        (Scale(0, 144), ["0", "20", "40", "60", "80", "100", "120", "140"]),
        (Scale(0, 1), ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (Scale(-0.3, 0.7), ["-0.2", "0", "0.2", "0.4", "0.6"]),
        (Scale(0, 27_000), ["0", "5k", "10k", "15k", "20k", "25k"]),
        (Scale(9e5, 1.4e6), ["900k", "1M", "1.1M", "1.2M", "1.3M", "1.4M"]),
        (Scale(0, 5e-5), ["0", "1e-5", "2e-5", "3e-5", "4e-5", "5e-5"]),
        (Scale(12.301, 12.306), ["12.301", "12.302", "12.303", "12.304", "12.305", "12.306"]),
        (Scale(0.005, 3.0, True), ["0.01", "0.1", "1"]),
        (Scale(1, 60, True), ["1", "3", "10", "30"]),
        (Scale(1e-9, 1e9, True), ["1e-9", "1e-5", "0.1", "1000", "10M"]),
    ],
)
def test_ticks_are_round_values_or_powers_of_ten_with_as_many_decimals_as_they_need(scale, expected):
    assert [tick.label for tick in scale.ticks(5)] == expected


@pytest.mark.parametrize("factors", [(0, 1), (1, 1.0001), (-1, 1), (1, 100)])
def test_every_range_has_a_few_ticks_inside_the_axis(factors):
    for exponent in range(-300, 300, 7):
        low, high = (factor * 10.0**exponent for factor in factors)
        ticks = Scale(low, high).ticks()
        assert 3 <= len(ticks) <= 9, f"from {low} to {high}"
        assert all(-0.1 <= tick.position <= 100.1 for tick in ticks), f"from {low} to {high}"
        assert len({tick.label for tick in ticks}) == len(ticks) or factors == (1, 1.0001), f"from {low} to {high}"


def test_values_with_a_unit_and_early_steps_begin_at_zero_and_a_wide_range_of_losses_is_logarithmic():
    assert value_scale([8.0, 10.0], from_zero=True, may_be_log=False).low == 0
    assert value_scale([8.0, 10.0], from_zero=False, may_be_log=True) == Scale(8.0 - 0.12, 10.0 + 0.12)
    assert value_scale([0.01, 10.0], from_zero=False, may_be_log=True).is_log
    assert not value_scale([0.0, 10.0], from_zero=False, may_be_log=True).is_log
    for value, from_zero in product((0.0, 5.0, -5.0, 1e-300), (False, True)):  # a constant curve
        scale = value_scale([value, value], from_zero, may_be_log=True)
        assert scale.low <= value < scale.high, f"{value} from_zero={from_zero}"
    assert step_scale([9, 300]) == Scale(0, 300) and step_scale([900, 1000]) == Scale(900, 1000)
    assert step_scale([0]) == Scale(0, 1)


def test_a_reduced_curve_keeps_first_last_extreme_and_missing_values():
    values = [math.sin(index / 1000) for index in range(100_000)]
    values[31_234], values[77_777], values[50_000] = 9.0, -9.0, math.nan
    kept = plot.reduced(values)
    assert {0, 31_234, 50_000, 77_777, 99_999} <= set(kept) and len(kept) < 1100 and kept == sorted(set(kept))
    assert plot.reduced([1.0] * 1000) == list(range(1000))


def test_a_value_that_is_not_finite_interrupts_the_line_and_areas_lie_on_each_other():
    values = [0.0, 1.0, math.nan, 0.5, math.inf, 0.0, 0.25]
    x = Scale(0, 10)
    assert paths(range(7), values, x, UNIT) == [
        f"0.0,{HEIGHT:.1f} {WIDTH / 10:.1f},0.0",
        "300.0,200.0 300.0,200.0",
        "500.0,400.0 600.0,300.0",
    ]
    assert paths([1], [math.nan], x, UNIT) == []
    lower, upper = plot.areas([0, 10], [[0.25, 0.5], [0.25, 0.25]], x, UNIT)
    assert lower == "0.0,300.0 1000.0,200.0 1000.0,400.0 0.0,400.0"
    assert upper == "0.0,200.0 1000.0,100.0 1000.0,200.0 0.0,300.0"


def test_ticks_of_samples_lie_at_the_steps_that_have_used_them():
    ticks = mapped_ticks([10, 20, 30], [100.0, 200.0, 600.0], Scale(0, 40))  # a larger batch from step 20 on
    labels, positions = zip(*((tick.label, tick.position) for tick in ticks), strict=True)
    assert labels == ("0", "200", "400", "600", "800", "1000") and positions == (0, 50, 62.5, 75, 87.5, 100)
    assert mapped_ticks([10], [100.0], UNIT) == [] and mapped_ticks([1, 2], [5.0, 5.0], UNIT) == []
