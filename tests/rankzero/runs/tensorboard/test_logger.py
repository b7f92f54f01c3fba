import time

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rankzero.runs.directory import RunDirectory
from rankzero.runs.tensorboard import logger as logger_module
from rankzero.runs.tensorboard.logger import DurableTensorBoardLogger
from running import disk_at


@pytest.fixture
def small_disk(tmp_path):
    with disk_at(tmp_path / "disk", "64k") as disk:
        yield disk


def test_events_are_written_once_a_full_disk_has_space_again(small_disk, monkeypatch, recwarn):
    monkeypatch.setattr(logger_module, "RETRY_SECONDS", 1.1)  # TensorBoard sorts files by the second in their names
    logger = DurableTensorBoardLogger(RunDirectory(small_disk))
    logger.purge_from(0)
    logger.log_metrics({"loss": 1.0}, 0)
    logger.flush()
    filling = small_disk / "filling"
    with filling.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(1024))
    for step in range(1, 400):  # the last page of the event file has room for some events
        logger.log_metrics({"loss": 1.0 + step}, step)
        logger.flush()
    filling.unlink()
    time.sleep(1.2)
    for step in range(400, 402):
        logger.log_metrics({"loss": 1.0 + step}, step)
        logger.flush()
    logger.finalize("success")
    assert any("TensorBoard's curves cannot be written" in str(warning.message) for warning in recwarn)
    events = EventAccumulator(str(small_disk / "tensorboard"))
    events.Reload()
    steps = [event.step for event in events.Scalars("loss")]
    assert sorted(set(steps)) == list(range(402))


def test_an_error_other_than_a_full_disk_is_raised(tmp_path):
    with pytest.raises(ValueError, match="not supported"):
        DurableTensorBoardLogger(RunDirectory(tmp_path)).log_metrics({"loss": object()}, 0)
