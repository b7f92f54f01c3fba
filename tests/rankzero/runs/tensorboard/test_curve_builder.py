import math
import random

import pytest

from rankzero.runs.tensorboard import curve_builder
from rankzero.runs.tensorboard.curve_builder import CurveBuilder


@pytest.fixture
def few_points(monkeypatch):
    monkeypatch.setattr(curve_builder, "MAX_POINTS", 16)


def build(points):
    builder = CurveBuilder()
    for step, value in points:
        builder.add(step, 1e9 + step, value)
    return builder.build()


def test_short_curves_keep_all_points_and_the_value_at_a_step_is_the_newest_logged_before():
    curve = build((step, float(step)) for step in range(curve_builder.MAX_POINTS))
    assert list(curve.steps) == list(range(curve_builder.MAX_POINTS)) and not curve.is_downsampled
    curve = build([(10, 0.5), (20, 0.25)])
    assert [curve.at(step) for step in (10, 19, 20, 99)] == [0.5, 0.5, 0.25, 0.25] and math.isnan(curve.at(9))


@pytest.mark.parametrize("count", [17, 100, 1000, 12_345])
@pytest.mark.parametrize("every", [1, 7, 50])
def test_a_long_curve_keeps_its_first_and_last_point_and_equal_distances(few_points, count, every):
    steps = range(0, count * every, every)
    curve = build((step, step / 2) for step in steps)
    assert 4 <= len(curve.steps) <= 16 and (curve.steps[0], curve.steps[-1]) == (0, steps[-1])
    distances = [after - before for before, after in zip(curve.steps, curve.steps[1:], strict=False)][:-1]
    assert max(distances) - min(distances) <= every
    assert [1e9 + step for step in curve.steps] == list(curve.times)
    assert [step / 2 for step in curve.steps] == list(curve.values)


def test_extreme_and_infinite_values_of_all_points_are_known(few_points):
    values = [1.0] * 1000
    values[331], values[332], values[333], values[335] = -7.0, math.nan, math.inf, 9.0
    curve = build(enumerate(values))
    assert (curve.low, curve.high, curve.not_finite, curve.count) == (-7.0, 9.0, 2, 1000) and curve.is_downsampled
    curve = build((step, math.nan) for step in range(1000))
    assert math.isnan(curve.low) and math.isnan(curve.high) and curve.not_finite == 1000


def test_points_are_sorted_and_of_points_with_the_same_step_the_last_remains(few_points):
    curve = build((step, float(epoch)) for epoch in range(5) for step in range(8))
    assert list(curve.steps) == list(range(8)) and set(curve.values) == {4.0} and len(curve.values) == 8
    steps = list(range(1000))
    random.Random(0).shuffle(steps)
    curve = build((step, float(step)) for step in steps)
    assert list(curve.steps) == sorted(curve.steps) and len(curve.steps) <= 16 and curve.count == 1000


def test_the_last_point_of_each_file_and_common_steps_of_curves_with_the_same_steps_remain(few_points):
    builder = CurveBuilder()
    for step in range(1000):
        builder.add(step, float(step), float(step))
        if step in (123, 124, 777):
            builder.end_file()
    steps = list(builder.build().steps)
    assert {123, 124, 777, 999} <= set(steps) and steps == sorted(set(steps))
    full, half = (build((step, 1.0) for step in range(first, 10_000, 10)) for first in (0, 5000))
    later = [step for step in full.steps if step >= 5000]
    assert set(later) <= set(half.steps) and len(later) >= 2
