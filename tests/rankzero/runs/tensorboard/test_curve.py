import math

from rankzero.runs.tensorboard.curve import Curve


def test_the_value_at_a_step_is_the_newest_logged_before():
    curve = Curve([10, 20], [1.0, 2.0], [0.5, 0.25])
    assert [curve.at(step) for step in (10, 19, 20, 99)] == [0.5, 0.5, 0.25, 0.25]
    assert math.isnan(curve.at(9))
