import math

import pytest
from reported import scalars_of
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_tensor_proto

from rankzero.runs.directory import RunDirectory
from rankzero.runs.tensorboard import curve_builder
from rankzero.runs.tensorboard.curves import read_curves
from rankzero.runs.tensorboard.logger import DurableTensorBoardLogger
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
    assert list(read_curves(tmp_path)[TAG].steps) == [0, 1, 3]


def test_any_number_is_read_also_if_stored_as_a_tensor_and_texts_and_other_tensors_are_not(tmp_path):
    def stored_as_tensor(tag, content, kind="scalars"):
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name=kind))
        return Summary.Value(tag=tag, tensor=make_tensor_proto(content), metadata=metadata)

    values = [stored_as_tensor(f"odd {content}", content) for content in ([1.0, 2.0], [], "abc")]
    values += [stored_as_tensor("new", 2.5), stored_as_tensor("note", "words", "text")]
    numbers = [scalar("loss", step, value) for step, value in enumerate((math.nan, math.inf, -math.inf, 1.0))]
    write(tmp_path / "events.out.tfevents.1", opening(1.0), Event(step=7, summary=Summary(value=values)), *numbers)
    curves = read_curves(tmp_path)
    assert {tag: str(points_of(curve)) for tag, curve in curves.items()} == {
        "loss": "[(0, nan), (1, inf), (2, -inf), (3, 1.0)]",
        "new": "[(7, 2.5)]",
    }


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
