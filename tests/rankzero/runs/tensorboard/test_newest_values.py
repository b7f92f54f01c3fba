import os

import pytest
from torch.utils.tensorboard import SummaryWriter

from rankzero.runs.tensorboard.newest_values import TAIL_BYTES, newest_values
from recorded_runs import write_curves


def test_the_newest_value_of_each_tag_is_read_from_the_end_of_a_long_file(tmp_path):
    steps = range(5000)
    write_curves(tmp_path, {"loss": {step: 1 / (step + 1) for step in steps}, "val": {4990: 0.5}, "old": {0: 1.0}})
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert file.stat().st_size > 2 * TAIL_BYTES
    values = newest_values(tmp_path / "tensorboard")
    assert values["loss"].step == 4999 and values["loss"].number == pytest.approx(1 / 5000)
    assert values["val"] == (4990, 0.5) and "old" not in values


@pytest.mark.parametrize("lost_bytes", [0, 1, 4, 5, 20])
def test_an_incomplete_last_record_is_ignored(tmp_path, lost_bytes):
    write_curves(tmp_path, {"loss": {0: 1.0, 1: 2.0, 2: 3.0}})
    (file,) = (tmp_path / "tensorboard").iterdir()
    file.write_bytes(file.read_bytes()[: file.stat().st_size - lost_bytes])
    assert newest_values(tmp_path / "tensorboard")["loss"].step == (2 if lost_bytes < 5 else 1)


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
