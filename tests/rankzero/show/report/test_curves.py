import math
import random

import pytest
from reported import scalars_of

from rankzero.runs.directory import RunDirectory
from rankzero.runs.metrics_file import Row
from rankzero.show.report import curves as curves_module
from rankzero.show.report.curves import CurveBuilder, read_curves
from rankzero.show.tensorboard_logger import DurableTensorBoardLogger


def log(folder, values, purge_from=None):
    """Logs values as one attempt does; `values` are pairs of step and value."""
    logger = DurableTensorBoardLogger(RunDirectory(folder))
    if purge_from is not None:
        logger.purge_from(purge_from)
    for step, value in values:
        logger.log_metrics({"loss": value, "accuracy": value / 2}, step)
    logger.finalize("success")


def points_of(curve):
    return list(zip(curve.steps, curve.values, strict=True))


def test_a_resumed_attempt_removes_values_of_a_lost_one_which_tensorboard_hides(tmp_path):
    log(tmp_path, [(step, 1.0) for step in range(0, 60, 10)])
    log(tmp_path, [(step, 2.0) for step in range(25, 60, 10)], purge_from=20)
    log(tmp_path, [(step, 3.0) for step in range(48, 60, 10)], purge_from=47)
    curves = read_curves(tmp_path)
    loss = curves["loss"]
    assert points_of(loss) == [(0, 1), (10, 1), (25, 2), (35, 2), (45, 2), (48, 3), (58, 3)]
    assert list(curves) == ["accuracy", "loss"] and list(loss.times) == sorted(loss.times) and loss.times[0] > 1e9
    files = sorted((tmp_path / "tensorboard").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    for number, path in enumerate(files):  # TensorBoard sorts files by the second in their names
        path.rename(path.with_name(f"events.out.tfevents.{number}"))
    assert scalars_of(tmp_path)["loss"] == dict(points_of(loss))


@pytest.fixture
def few_points(monkeypatch):
    monkeypatch.setattr(curves_module, "MAX_POINTS", 16)


def build(points):
    builder = CurveBuilder()
    for step, value in points:
        builder.add(Row(step, 1e9 + step, {}, step / 100, 32 * step), value)
    return builder.build()


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
    assert [step / 100 for step in curve.steps] == curve.epochs and [32 * step for step in curve.steps] == curve.samples


def test_extreme_and_infinite_values_of_all_points_are_known(few_points):
    values = [1.0] * 1000
    values[331], values[332], values[333], values[335] = -7.0, math.nan, math.inf, 9.0
    curve = build(enumerate(values))
    assert (curve.low, curve.high, curve.not_finite, curve.count) == (-7.0, 9.0, 2, 1000) and curve.is_downsampled
    curve = build((step, math.nan) for step in range(1000))
    assert math.isnan(curve.low) and math.isnan(curve.high) and curve.not_finite == 1000


def test_points_are_sorted_the_last_with_the_same_step_remains_and_curves_with_the_same_steps_keep_common_ones(
    few_points,
):
    curve = build((step, float(epoch)) for epoch in range(5) for step in range(8))
    assert list(curve.steps) == list(range(8)) and set(curve.values) == {4.0} and len(curve.values) == 8
    steps = list(range(1000))
    random.Random(0).shuffle(steps)
    curve = build((step, float(step)) for step in steps)
    assert list(curve.steps) == sorted(curve.steps) and len(curve.steps) <= 16 and curve.count == 1000
    full, half = (build((step, 1.0) for step in range(first, 10_000, 10)) for first in (0, 5000))
    later = [step for step in full.steps if step >= 5000]
    assert set(later) <= set(half.steps) and len(later) >= 2
