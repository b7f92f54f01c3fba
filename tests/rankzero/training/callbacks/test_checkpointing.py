import math
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from boring_models import DropoutNet, samples
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from rankzero import Trainer
from rankzero.checkpoints.checkpoint_io import DirectoryCheckpointIO
from rankzero.checkpoints.manifest import Retention, checkpoints_in
from rankzero.cli.flags import save_interval
from rankzero.runs.directory import RunDirectory
from rankzero.training.callbacks import checkpointing
from rankzero.training.callbacks.checkpointing import CLOCK_STEPS, CheckpointCallback, Interval
from rankzero.training.callbacks.safe_point import SafePoint
from running import train_in_process
from stock import QUIET


def test_intervals_are_read_from_text_that_the_flag_accepts():
    expected = {"5": Interval(epochs=5), "200steps": Interval(steps=200), "1step": Interval(steps=1)}
    expected |= {"90s": Interval(seconds=90), "15min": Interval(seconds=900), "02h": Interval(seconds=7200)}
    assert {save_interval(text): Interval.read(text) for text in expected} == expected


@pytest.mark.parametrize(
    ("interval", "settings", "steps"),
    [
        *((Interval(epochs=1), {}, [7, 14, 21]), (Interval(epochs=2), {}, [14, 21]), (Interval(epochs=9), {}, [21])),
        *((Interval(seconds=0.001), {}, [16, 21]), (Interval(seconds=3600), {}, [21])),
        (Interval(steps=5), {}, [5, 10, 15, 20, 21]),
        (Interval(steps=2), {"keep": 3, "max_epochs": 2}, [10, 12, 14]),
        (Interval(steps=1), {"max_epochs": 1, "accumulate_grad_batches": 3}, [1, 2, 3]),
    ],
    ids=str,
)
def test_saves_at_the_interval_and_at_the_end_and_keeps_the_newest(tmp_path, interval, settings, steps):
    settings = {"max_epochs": 3, "limit_train_batches": 7, "limit_val_batches": 0, "keep": 100, **settings}
    retention = Retention(settings.pop("keep"))
    callback = CheckpointCallback(RunDirectory(tmp_path), interval, lambda: {"run": "x"}, retention)
    safe_point = SafePoint(SimpleNamespace(position=-1, stop_reason=None), math.inf, callback, None)
    settings |= {"plugins": [DirectoryCheckpointIO()], "enable_checkpointing": True}
    train_in_process(callback, loops=True, subscribers=[safe_point], **settings)
    assert [int(path.name.removeprefix("step-")) for path in checkpoints_in(tmp_path / "checkpoints")] == steps


def test_rank_zeros_clock_decides_on_a_save_and_no_rank_waits_for_it_in_the_same_step(tmp_path, monkeypatch):
    callback = CheckpointCallback(RunDirectory(tmp_path), Interval(seconds=1), lambda: {"run": "x"}, Retention(1))
    trainer, events = SimpleNamespace(world_size=2), []

    def begin_gather_rows(row):
        events.append("begin")
        rows = torch.tensor([[1.0], [0.0]])  # only rank zero's clock has reached the interval
        return SimpleNamespace(wait=lambda: events.append("wait") or rows)

    monkeypatch.setattr(checkpointing, "strategy_of", lambda _: SimpleNamespace(begin_gather_rows=begin_gather_rows))
    callback.checked_step, clock = CLOCK_STEPS - 1, CLOCK_STEPS
    assert not callback._is_interval_over(clock, trainer) and events == ["begin"]
    assert callback._is_interval_over(clock + 1, trainer) and events == ["begin", "wait"]
    assert not callback._is_interval_over(clock + 2, trainer) and events == ["begin", "wait"]


@pytest.mark.parametrize("is_rank_zero", [True, False])
def test_only_rank_zero_copies_the_weights_of_the_last_checkpoint(tmp_path, is_rank_zero):
    callback = CheckpointCallback(RunDirectory(tmp_path), Interval(epochs=1), lambda: {"run": "x"}, Retention(1))
    callback._is_over = True
    checkpoint = {"state_dict": {"weight": torch.ones(2)}}
    callback.on_save_checkpoint(SimpleNamespace(is_global_zero=is_rank_zero), None, checkpoint)
    assert list(callback._last_weights) == ["weight"] * is_rank_zero


class Net(DropoutNet):
    def __init__(self, width=1):
        super().__init__()
        self.save_hyperparameters()


class RecordingLogger(CSVLogger):
    """Records the newest and the best checkpoint after each save, as loggers do that upload checkpoints."""

    def after_save_checkpoint(self, checkpoint_callback):
        paths = checkpoint_callback.last_model_path, checkpoint_callback.best_model_path
        self.saved = [*getattr(self, "saved", []), paths]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_public_attributes_of_the_best_checkpoint_are_those_of_lightnings_model_checkpoint(script_folder, mode):
    """Only the paths differ."""
    stock, logger = ModelCheckpoint(monitor="val_loss", mode=mode, save_last=True), RecordingLogger("logs")
    trainer = Trainer(max_epochs=3, keep_best=f"{mode}:val_loss", logger=logger, **QUIET)
    own = trainer.checkpoint_callback
    assert own.best_model_path == ""
    for user in (pl.Trainer(max_epochs=3, callbacks=stock, **QUIET), trainer):
        user.fit(Net(width=3), samples(), samples())
    names = {name for name in {*dir(ModelCheckpoint), *vars(stock)} if not name.startswith("_")}
    found, expected = ({name: getattr(callback, name) for name in names} for callback in (own, stock))
    (score,), (expected_score,) = (values.pop("best_k_models").values() for values in (found, expected))
    assert score == expected_score
    differing = {name for name in names if not callable(found.get(name)) and found.get(name) != expected.get(name)}
    assert {name for name in differing if not name.endswith("_path")} == {"dirpath", "state_key"}
    for path in (own.best_model_path, own.last_model_path):
        assert path.startswith(f"{own.dirpath}/") and Net.load_from_checkpoint(path).hparams == {"width": 3}
        assert torch.load(path)["optimizer_states"]
    assert len(logger.saved) == 3 and logger.saved[-1] == (own.last_model_path, own.best_model_path)
    assert Path(own.last_model_path).parent.name == "step-00000018"
