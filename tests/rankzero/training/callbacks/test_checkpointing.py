import pytest

from rankzero.runs.checkpoints.checkpoint_io import DirectoryCheckpointIO
from rankzero.runs.checkpoints.manifest import checkpoints_in
from rankzero.runs.checkpoints.retention import Retention
from rankzero.runs.directory import RunDirectory
from rankzero.training.callbacks.checkpointing import CheckpointCallback, Interval
from running import train_in_process


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("5", Interval(epochs=5)),
        ("200steps", Interval(steps=200)),
        ("1step", Interval(steps=1)),
        ("90s", Interval(seconds=90)),
        ("15min", Interval(seconds=900)),
        ("2h", Interval(seconds=7200)),
    ],
)
def test_interval_is_read_from_text(text, interval):
    assert Interval.read(text) == interval


@pytest.mark.parametrize(
    ("interval", "settings", "steps"),
    [
        (Interval(epochs=1), {}, [7, 14, 21]),
        (Interval(epochs=2), {}, [14, 21]),
        (Interval(epochs=9), {}, [21]),
        (Interval(steps=5), {}, [5, 10, 15, 20, 21]),
        (Interval(seconds=0.001), {}, [16, 21]),
        (Interval(seconds=3600), {}, [21]),
        (Interval(steps=2), {"keep": 3, "max_epochs": 2}, [10, 12, 14]),
        (Interval(steps=1), {"max_epochs": 1, "accumulate_grad_batches": 3}, [1, 2, 3]),
    ],
    ids=str,
)
def test_saves_at_the_interval_and_at_the_end_and_keeps_the_newest(tmp_path, interval, settings, steps):
    settings = {"max_epochs": 3, "limit_train_batches": 7, "limit_val_batches": 0, "keep": 100, **settings}
    retention = Retention(settings.pop("keep"))
    callback = CheckpointCallback(RunDirectory(tmp_path), interval, lambda: {"run": "x"}, retention)
    plugins = [DirectoryCheckpointIO()]
    train_in_process(callback, loops=True, plugins=plugins, enable_checkpointing=True, **settings)
    saved = checkpoints_in(tmp_path / "checkpoints")
    assert [int(path.name.removeprefix("step-")) for path in saved] == steps
