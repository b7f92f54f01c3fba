import subprocess

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from project import tensorboard
from project.tensorboard import CurvesLogger
from running import require


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 64 KiB."""
    require("strace")  # and root
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk_costs_a_gap_in_the_curve(small_disk, monkeypatch, recwarn):
    monkeypatch.setattr(tensorboard, "AGAIN_SECONDS", 0.0)
    logger = CurvesLogger(small_disk, name="", version="curves", purge_step=0)
    logger.log_metrics({"loss": 1.0}, 0)
    logger.save()
    filling = small_disk / "filling"
    with filling.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(1024))
    for step in range(1, 400):  # the file's last page has room for some
        logger.log_metrics({"loss": 1.0 + step}, step)
        logger.save()
    filling.unlink()
    for step in range(400, 402):
        logger.log_metrics({"loss": 1.0 + step}, step)
        logger.save()
    logger.finalize("success")
    assert any("TensorBoard's curve has a gap" in str(warning.message) for warning in recwarn)
    events = EventAccumulator(str(small_disk / "curves"))
    events.Reload()
    steps = [event.step for event in events.Scalars("loss")]
    assert steps[0] == 0 and steps[-1] == 401 and len(steps) < 402


def test_any_other_error_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="not supported"):
        CurvesLogger(tmp_path, name="", version="curves").log_metrics({"loss": object()}, 0)
