import math

from rankzero.runs.tensorboard.curve import Curve


def test_the_value_at_a_step_is_the_newest_logged_before():
    curve = Curve([10, 20], [1.0, 2.0], [0.5, 0.25])
    assert [curve.at(step) for step in (10, 19, 20, 99)] == [0.5, 0.5, 0.25, 0.25]
    assert math.isnan(curve.at(9))


def test_the_bounds_of_a_curve_are_those_of_its_finite_values():
    curve = Curve([0, 1, 2], [0.0] * 3, [3.0, math.inf, 2.0])
    assert (curve.low, curve.high, curve.not_finite, curve.count) == (2.0, 3.0, 1, 3) and not curve.is_downsampled
