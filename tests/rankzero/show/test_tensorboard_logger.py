import errno
import shutil
import threading
from unittest.mock import Mock

import pytest
from reported import scalars_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from rankzero.runs.directory import RunDirectory
from rankzero.runs.metrics_file import Row, append_rows, read_rows
from rankzero.show import tensorboard_logger as logger_module
from rankzero.show.report.curves import read_curves
from rankzero.show.tensorboard_logger import DurableTensorBoardLogger
from running import disk_at


def log_and_flush(logger, steps):
    for step in steps:
        logger.log_metrics({"loss": 1.0 + step}, step)
        logger.flush()


def logged_steps(run):
    return list(read_curves(run.path)["loss"].steps)


def test_events_are_written_once_a_full_disk_has_space_again(tmp_path, monkeypatch, recwarn):
    # TensorBoard reads the files of one second in the order of this number as text.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(1000))
    monkeypatch.setattr(logger_module, "RETRY_SECONDS", 0.0)
    with disk_at(tmp_path / "disk", "64k") as disk:
        errors = []
        monkeypatch.setattr(threading, "excepthook", errors.append)
        logger = DurableTensorBoardLogger(RunDirectory(disk))
        logger.purge_from(0)
        log_and_flush(logger, range(1))
        filling = disk / "filling"
        with filling.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            while True:
                file.write(bytes(1024))
        log_and_flush(logger, range(1, 400))  # the last page of the event file has room for some events
        logger.log_text("note", 9999 * "words ", 400)
        logger.flush()
        filling.unlink()
        log_and_flush(logger, range(400, 402))
        logger.finalize("success")
        events = EventAccumulator(str(disk / "tensorboard"))
        events.Reload()
    assert errors == []
    assert any("the run's curves cannot be written" in str(warning.message) for warning in recwarn)
    assert sorted({event.step for event in events.Scalars("loss")}) == list(range(402))


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
    assert list(scalars_of(run.path)["loss"]) == [5, 6, 7, 8, 9]
    assert logged_steps(run) == ([5, 6, 7, 8, 9] if deleted == "x" else list(range(10)))


def test_values_of_a_lost_attempt_stay_hidden_after_the_file_of_its_successor_was_deleted(tmp_path):
    run = RunDirectory(tmp_path / "x")
    lost = DurableTensorBoardLogger(run)
    log_and_flush(lost, range(10))
    lost.finalize("success")
    earlier = set(tmp_path.rglob("events*"))
    logger = DurableTensorBoardLogger(run)
    logger.purge_from(5)
    log_and_flush(logger, [5])
    for path in set(tmp_path.rglob("events*")) - earlier:
        path.unlink()
    log_and_flush(logger, [6, 7])
    logger.finalize("success")
    assert list(scalars_of(run.path)["loss"]) == [0, 1, 2, 3, 4, 6, 7] and len(set(tmp_path.rglob("events*"))) == 2
    assert logged_steps(run) == list(range(8))


def test_a_new_file_after_an_outage_does_not_hide_the_values_of_its_attempt(tmp_path):
    logger = DurableTensorBoardLogger(run := RunDirectory(tmp_path / "x"))
    logger.purge_from(5)
    for step in (5, 6, 7):
        log_and_flush(logger, [step])
        if step < 7:
            logger._leave_file()
    logger.finalize("success")
    files = set(tmp_path.rglob("events*"))
    logger.flush()
    assert set(tmp_path.rglob("events*")) == files and len(files) == 3  # a finished logger makes no new file
    assert logged_steps(run) == [5, 6, 7]


def test_values_are_kept_in_memory_while_the_folder_cannot_be_created_and_other_errors_are_raised(tmp_path, recwarn):
    run = RunDirectory(tmp_path / "x")
    logger = DurableTensorBoardLogger(run)
    with pytest.raises(ValueError, match="not supported"):
        logger.log_metrics({"loss": object()}, 0)
    logger.log_metrics({"loss": 0.0}, 0)
    shutil.rmtree(run.path)
    run.path.write_text("a file in place of the folder")
    log_and_flush(logger, range(1, 4))
    run.path.unlink()
    logger.finalize("success")
    (warning,) = warnings_in(recwarn)
    assert "kept in memory" in warning and str(run.path) in warning
    assert logged_steps(run) == [1, 2, 3]


def test_rows_that_are_logged_an_interval_later_state_the_position_of_their_step(tmp_path):
    logger, position = DurableTensorBoardLogger(RunDirectory(tmp_path)), [0.5, 320]
    logger.position = lambda: tuple(position)
    logger.mark_interval(9)
    position[:] = 1.0, 640
    for step in (9, 19):
        logger.log_metrics({"loss": 1.0}, step)
    logger.finalize("success")
    assert [(row.epoch, row.samples) for row in read_rows(tmp_path)] == [(0.5, 320), (1.0, 640)]


def test_rows_of_a_lost_attempt_are_removed_once_a_full_disk_has_space_again(tmp_path, monkeypatch):
    append_rows(tmp_path, [Row(step, 1e9, {"loss": 1.0}) for step in range(3)], durably=True)
    logger, full = DurableTensorBoardLogger(RunDirectory(tmp_path)), OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(logger_module, "cut_rows", Mock(side_effect=full))
        logger.purge_from(1)
        logger.log_metrics({"loss": 2.0}, 1)
    logger.finalize("success")
    assert [(row.step, row.values["loss"]) for row in read_rows(tmp_path)] == [(0, 1.0), (1, 2.0)]


def test_rows_of_a_step_that_awaits_another_row_are_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(logger_module, "FLUSH_SECONDS", 0)
    logger = DurableTensorBoardLogger(RunDirectory(tmp_path))
    for step in range(2):
        logger.awaited_step = step
        logger.log_metrics({"loss": 1.0}, step)
        logger.awaited_step = None
        logger.log_metrics({"train/lr": 0.1}, step)
    assert [sorted(row.values) for row in read_rows(tmp_path)] == [["loss", "train/lr"]] * 2


def test_numbers_beside_other_values_are_rows_and_a_closed_writer_is_replaced(tmp_path):
    logger = DurableTensorBoardLogger(RunDirectory(tmp_path))
    logger.log_metrics({"loss": 1.0, "parts": {"a": 1.0}}, 0)
    logger.experiment.close()
    logger.log_metrics({"loss": 2.0}, 1)
    logger.finalize("success")
    assert [row.values for row in read_rows(tmp_path)] == [{"loss": 1.0}, {"loss": 2.0}]
    assert scalars_of(tmp_path)["loss"] == {0: 1.0, 1: 2.0}
