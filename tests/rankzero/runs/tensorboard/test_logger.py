import shutil

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from rankzero.runs.directory import RunDirectory
from rankzero.runs.tensorboard import logger as logger_module
from rankzero.runs.tensorboard.curves import read_curves
from rankzero.runs.tensorboard.logger import DurableTensorBoardLogger
from running import disk_at


@pytest.fixture
def small_disk(tmp_path):
    with disk_at(tmp_path / "disk", "64k") as disk:
        yield disk


def log_and_flush(logger, steps):
    for step in steps:
        logger.log_metrics({"loss": 1.0 + step}, step)
        logger.flush()


def test_events_are_written_once_a_full_disk_has_space_again(small_disk, monkeypatch, recwarn):
    # TensorBoard reads the files of one second in the order of this number as text.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(1000))
    monkeypatch.setattr(logger_module, "RETRY_SECONDS", 0.0)
    logger = DurableTensorBoardLogger(RunDirectory(small_disk))
    logger.purge_from(0)
    log_and_flush(logger, range(1))
    filling = small_disk / "filling"
    with filling.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(1024))
    log_and_flush(logger, range(1, 400))  # the last page of the event file has room for some events
    filling.unlink()
    log_and_flush(logger, range(400, 402))
    logger.finalize("success")
    assert any("TensorBoard's curves cannot be written" in str(warning.message) for warning in recwarn)
    events = EventAccumulator(str(small_disk / "tensorboard"))
    events.Reload()
    steps = [event.step for event in events.Scalars("loss")]
    assert sorted(set(steps)) == list(range(402))


def warnings_in(recwarn):
    return [str(warning.message) for warning in recwarn if "rankzero: " in str(warning.message)]


@pytest.mark.parametrize("deleted", ["x", "x/tensorboard", "x/tensorboard/events*"])
def test_values_are_written_again_after_their_folder_or_file_was_deleted(tmp_path, recwarn, deleted):
    run = RunDirectory(tmp_path / "x")
    logger = DurableTensorBoardLogger(run)
    logger.purge_from(3)
    for step in range(10):
        if step == 5:
            for path in tmp_path.glob(deleted):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        logger.log_metrics({"loss": float(step)}, step)
        if step % 2:
            logger.log_text("note", "words", step)
        logger.flush()
    logger.finalize("success")
    (warning,) = warnings_in(recwarn)
    assert str(run.path / "tensorboard") in warning and "was deleted" in warning
    assert list(read_curves(run.path / "tensorboard")["loss"].steps) == [5, 6, 7, 8, 9]
    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [5, 6, 7, 8, 9]


def test_values_of_a_lost_attempt_stay_hidden_after_the_file_of_its_successor_was_deleted(tmp_path):
    run = RunDirectory(tmp_path / "x")
    lost = DurableTensorBoardLogger(run)
    for step in range(10):
        lost.log_metrics({"loss": 1.0}, step)
    lost.finalize("success")
    earlier = set(tmp_path.rglob("events*"))
    logger = DurableTensorBoardLogger(run)
    logger.purge_from(5)
    for step in (5, 6, 7):
        if step == 6:
            for path in set(tmp_path.rglob("events*")) - earlier:
                path.unlink()
        logger.log_metrics({"loss": 2.0}, step)
        logger.flush()
    logger.finalize("success")
    assert list(read_curves(run.path / "tensorboard")["loss"].steps) == [0, 1, 2, 3, 4, 6, 7]
    assert len(set(tmp_path.rglob("events*"))) == 2


def test_a_new_file_after_an_outage_does_not_hide_the_values_of_its_attempt(tmp_path):
    logger = DurableTensorBoardLogger(RunDirectory(tmp_path / "x"))
    logger.purge_from(5)
    for step in (5, 6, 7):
        logger.log_metrics({"loss": 2.0}, step)
        logger.flush()
        if step < 7:
            logger._leave_file()
    logger.finalize("success")
    files = set(tmp_path.rglob("events*"))
    logger.flush()
    assert set(tmp_path.rglob("events*")) == files and len(files) == 3  # a finished logger makes no new file
    assert list(read_curves(tmp_path / "x" / "tensorboard")["loss"].steps) == [5, 6, 7]


def test_values_are_kept_in_memory_while_the_folder_cannot_be_created(tmp_path, recwarn):
    run = RunDirectory(tmp_path / "x")
    logger = DurableTensorBoardLogger(run)
    logger.log_metrics({"loss": 0.0}, 0)
    shutil.rmtree(run.path)
    run.path.write_text("a file in place of the folder")
    for step in range(1, 4):
        logger.log_metrics({"loss": float(step)}, step)
        logger.flush()
    run.path.unlink()
    logger.finalize("success")
    (warning,) = warnings_in(recwarn)
    assert "kept in memory" in warning and str(run.path) in warning
    assert list(read_curves(run.path / "tensorboard")["loss"].steps) == [1, 2, 3]


def test_an_error_other_than_a_full_disk_is_raised(tmp_path):
    with pytest.raises(ValueError, match="not supported"):
        DurableTensorBoardLogger(RunDirectory(tmp_path)).log_metrics({"loss": object()}, 0)
