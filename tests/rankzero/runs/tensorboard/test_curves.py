import math
import os
import random

import pytest
from reported import scalars_of
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import SummaryWriter

from rankzero.runs.directory import RunDirectory
from rankzero.runs.tensorboard import curve_builder
from rankzero.runs.tensorboard.curve_builder import CurveBuilder
from rankzero.runs.tensorboard.curves import read_curves
from rankzero.runs.tensorboard.logger import DurableTensorBoardLogger
from rankzero.runs.tensorboard.newest_values import newest_values
from recorded_runs import write_curves
from running import run_without_importing


def write(path, *events):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for event in events:
            RecordWriter(file).write(event.SerializeToString())


def opening(seconds):
    return Event(wall_time=seconds, file_version="brain.Event:2")


def scalar(tag, step, value, seconds=0.0):
    return Event(wall_time=seconds, step=step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)]))


def session_start(step, seconds=0.0):
    return Event(wall_time=seconds, step=step, session_log=SessionLog(status=SessionLog.START))


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


def test_a_resumed_attempt_hides_values_of_a_lost_one_as_in_tensorboard(tmp_path):
    log(tmp_path, [(step, 1.0) for step in range(0, 60, 10)])
    log(tmp_path, [(step, 2.0) for step in range(25, 60, 10)], purge_from=20)
    log(tmp_path, [(step, 3.0) for step in range(48, 60, 10)], purge_from=47)
    curves = read_curves(tmp_path / "tensorboard")
    loss = curves["loss"]
    assert points_of(loss) == [(0, 1), (10, 1), (25, 2), (35, 2), (45, 2), (48, 3), (58, 3)]
    assert list(curves) == ["accuracy", "loss"] and list(loss.times) == sorted(loss.times) and loss.times[0] > 1e9
    files = sorted((tmp_path / "tensorboard").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    for number, path in enumerate(files):  # TensorBoard sorts files by the second in their names
        path.rename(path.with_name(f"events.out.tfevents.{number}"))
    assert scalars_of(tmp_path)["loss"] == dict(points_of(loss))


def test_files_created_within_one_second_are_read_in_the_order_of_their_first_events_and_others_are_ignored(tmp_path):
    (tmp_path / "events.out.tfevents.1").touch()
    (tmp_path / "hparams.yaml").write_text("lr: 0.1\n")
    (tmp_path / "tfevents").mkdir()
    write(tmp_path / "loss_train" / "events.out.tfevents.1", scalar("loss", 0, 1.0))
    assert read_curves(tmp_path) == read_curves(tmp_path / "missing") == {}
    write(tmp_path / "events.out.tfevents.1.host.9", opening(1.1), scalar("loss", 0, 1.0), scalar("loss", 5, 1.0))
    write(tmp_path / "events.out.tfevents.1.host.10", opening(1.9), session_start(3), scalar("loss", 3, 2.0))
    assert points_of(read_curves(tmp_path)["loss"]) == [(0, 1.0), (3, 2.0)]


TAG = "a/long/tag/of/a/user"
DAMAGES = {
    **{f"{lost} bytes lost": lambda data, lost=lost: data[:-lost] for lost in (1, 4, 5, 20, 40)},
    "zeros": lambda data: bytes(4096),
    "text": lambda data: b"text" * 100,
    "ones": lambda data: b"\xff" * 4096,
    "a wrong checksum": lambda data: data.replace(TAG.encode(), TAG.upper().encode()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_is_read_up_to_an_incomplete_or_damaged_record(tmp_path, damage):
    path = tmp_path / "events.out.tfevents.1"
    write(path, opening(1.0), scalar(TAG, 0, 1.0), scalar(TAG, 1, 1.0))
    intact = path.read_bytes()
    write(path, scalar(TAG, 2, 1.0))
    path.write_bytes(intact + DAMAGES[damage](path.read_bytes()))
    write(tmp_path / "events.out.tfevents.2", opening(2.0), scalar(TAG, 3, 2.0))
    curves = read_curves(tmp_path)
    assert list(curves) == [TAG] and list(curves[TAG].steps) == [0, 1, 3]


def test_downsampling_changes_neither_hidden_values_nor_the_end_of_an_attempt(tmp_path, monkeypatch):
    monkeypatch.setattr(curve_builder, "MAX_POINTS", 64)
    attempts = [(0, 5000), (3003, 3010), (3005, 9000)]  # the first step, and the step after the last one
    for number, (first, last) in enumerate(attempts, 1):
        values = (scalar("loss", step, number + step / 1e5, 1e4 * number + step) for step in range(first, last))
        write(tmp_path / f"events.out.tfevents.{number}", opening(float(number)), session_start(first), *values)
    loss = read_curves(tmp_path)["loss"]
    attempt_of = {step: int(value) for step, value in points_of(loss)}
    last_steps = [max(step for step in attempt_of if attempt_of[step] == number) for number in (1, 2, 3)]
    assert last_steps == [3002, 3004, 8999]
    assert all(attempt_of[step] == 1 + (step >= 3003) + (step >= 3005) for step in attempt_of)
    assert len(loss.steps) <= 64 + len(attempts) and loss.count == 9000
    assert [round(seconds) for seconds in loss.times] == [1e4 * attempt_of[step] + step for step in loss.steps]


def test_reading_imports_neither_torch_nor_lightning_nor_tensorflow(tmp_path):
    write(tmp_path / "events.out.tfevents.1", opening(1.0), scalar("loss", 0, 1.0))
    code = (
        "from pathlib import Path; from rankzero.runs.tensorboard.curves import read_curves\n"
        "assert read_curves(Path())['loss'].steps[0] == 0"
    )
    run_without_importing("torch", "lightning", "tensorflow", code=code, folder=tmp_path)


@pytest.fixture
def few_points(monkeypatch):
    monkeypatch.setattr(curve_builder, "MAX_POINTS", 16)


def build(points):
    builder = CurveBuilder()
    for step, value in points:
        builder.add(step, 1e9 + step, value)
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


def test_the_newest_value_of_each_tag_is_read_from_the_end_of_a_long_file(tmp_path):
    steps = range(5000)
    write_curves(tmp_path, {"loss": {step: 1 / (step + 1) for step in steps}, "val": {4990: 0.5}, "old": {0: 1.0}})
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert file.stat().st_size > 1 << 17
    values = newest_values(tmp_path / "tensorboard")
    assert values["loss"].step == 4999 and values["loss"].number == pytest.approx(1 / 5000)
    assert values["val"] == (4990, 0.5) and "old" not in values


def test_a_new_file_without_values_does_not_hide_those_of_the_earlier_attempt(tmp_path):
    write_curves(tmp_path, {"loss": {7: 1.0}})
    write_curves(tmp_path, {})
    for number, file in enumerate(sorted((tmp_path / "tensorboard").iterdir())):
        os.utime(file, (number, number))
    assert newest_values(tmp_path / "tensorboard") == {"loss": (7, 1.0)}


def test_values_before_large_images_are_found_and_damaged_and_missing_files_have_none(tmp_path):
    assert newest_values(tmp_path / "missing") == {}
    for content in (b"", bytes(1000), b"\xff" * 1000, b"text" * 5000):
        (tmp_path / "events.out.tfevents.1").write_bytes(content)
        assert newest_values(tmp_path) == {}
    with SummaryWriter(tmp_path) as writer:
        writer.add_scalar("val/loss", 0.25, 7)
        for step in range(3):
            writer.add_text("image", "x" * 300_000, step)
        writer.add_scalar("loss", 1.0, 8)
    assert newest_values(tmp_path) == {"val/loss": (7, 0.25), "loss": (8, 1.0)}
