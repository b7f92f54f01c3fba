from pathlib import Path

import pytest

from rankzero.runs.reports.comparison.x_axis import EPOCHS, SAMPLES, SECONDS, STEPS, XAxis
from rankzero.runs.reports.recorded.recorded_run import RecordedRun
from rankzero.runs.tensorboard.curve import Curve


def run(starts=(), **totals):
    return RecordedRun(Path("run"), starts=starts, **totals)


def curve(steps, times=None, values=None):
    return Curve(list(steps), list(times or [0.0] * len(steps)), list(values or [1.0] * len(steps)))


def test_samples_and_epochs_lie_on_lines_between_logged_positions_from_the_first_step_on():
    curves = {
        "x_axis/samples": curve([9, 19, 29], values=[320.0, 640.0, 800.0]),
        "x_axis/epoch": curve([9], values=[0.5]),
    }
    assert XAxis(SAMPLES, curves, run()).values(curve([-1, 9, 14, 29])) == [0.0, 320.0, 480.0, 800.0]
    assert XAxis(SAMPLES, curves, run()).values(curve([39])) == [960.0]  # after the last logged position
    assert XAxis(EPOCHS, curves, run()).values(curve([19])) == [pytest.approx(1.0)]
    curves = {"x_axis/samples": curve([-1, 9], values=[5.0, 320.0])}
    assert XAxis(SAMPLES, curves, run()).values(curve([9])) == [320.0]
    assert not XAxis(SAMPLES, {"x_axis/samples": curve([-1], values=[5.0])}, run()).is_known


def test_runs_without_logged_positions_are_drawn_by_their_totals_and_steps_and_seconds_need_nothing_else():
    axis = XAxis(SAMPLES, {"loss": curve([1])}, run(steps=10, samples=320, epochs=2))
    assert axis.is_estimated and axis.values(curve([-1, 4, 9])) == [0.0, 160.0, 320.0]
    assert XAxis(EPOCHS, {}, run(steps=10, epochs=2)).values(curve([9])) == [2.0]
    assert not XAxis(STEPS, {}, run(steps=10, epochs=2)).is_estimated
    axis = XAxis(STEPS, {}, run())
    assert axis.is_known and axis.values(curve([0, 7])) == [0.0, 7.0]
    assert XAxis(SECONDS, {"loss": curve([1])}, run()).is_known
    assert not XAxis(SAMPLES, {"loss": curve([1])}, run()).is_known


@pytest.mark.parametrize(
    ("starts", "times", "seconds"),
    [
        ([100.0, 1000.0], [110.0, 120.0, 1010.0, 1030.0], [10.0, 20.0, 30.0, 50.0]),
        ([100.0, 500.0, 600.0, 1000.0], [110.0, 1010.0], [10.0, 20.0]),
        ([], [110.0, 1010.0], [0.0, 900.0]),
        ([5000.0], [110.0, 1010.0], [0.0, 0.0]),
    ],
    ids=["two attempts", "attempts without values", "unknown starts", "a clock that was set back"],
)
def test_seconds_leave_out_the_time_between_attempts(starts, times, seconds):
    loss = curve(range(1, len(times) + 1), times=times)
    assert XAxis(SECONDS, {"loss": loss}, run(starts)).values(loss) == seconds
