from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from boring_models import DropoutNet, samples
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from rankzero import Trainer
from rankzero.runs.checkpoints.checkpoint_io import DirectoryCheckpointIO
from rankzero.runs.checkpoints.manifest import checkpoints_in
from rankzero.runs.checkpoints.retention import Retention
from rankzero.runs.directory import RunDirectory
from rankzero.training.callbacks.checkpointing import CheckpointCallback, Interval
from running import train_in_process
from stock import QUIET


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


class Net(DropoutNet):
    def __init__(self, width=1):
        super().__init__()
        self.save_hyperparameters()


class RecordingLogger(CSVLogger):
    """Records the newest and the best checkpoint after each save, as loggers do that upload checkpoints."""

    def after_save_checkpoint(self, checkpoint_callback):
        paths = checkpoint_callback.last_model_path, checkpoint_callback.best_model_path
        self.saved = [*getattr(self, "saved", []), paths]


@pytest.mark.parametrize("mode", [None, "min", "max"])
def test_public_attributes_are_those_of_lightnings_model_checkpoint(script_folder, mode):
    """Only the paths differ, and the newest checkpoint is always kept as the last one."""
    stock = ModelCheckpoint(monitor="val_loss", mode=mode, save_last=True) if mode else ModelCheckpoint()
    logger = RecordingLogger("logs")
    trainer = Trainer(max_epochs=3, keep_best=mode and f"{mode}:val_loss", logger=logger, **QUIET)
    own = trainer.checkpoint_callback
    assert isinstance(own, ModelCheckpoint) and trainer.checkpoint_callbacks == [own] and own.best_model_path == ""
    for user in (pl.Trainer(max_epochs=3, callbacks=stock, **QUIET), trainer):
        user.fit(Net(width=3), samples(), samples())
    values = {}
    for callback in (stock, own):
        names = {name for name in {*dir(ModelCheckpoint), *vars(stock)} if not name.startswith("_")}
        found = {name: getattr(callback, name) for name in sorted(names)}
        values[callback] = {name: value for name, value in found.items() if not callable(value)}
        paths = [value for name, value in values[callback].items() if name.endswith("_path") and value]
        paths += values[callback].pop("best_k_models")
        assert paths and all(path.startswith(f"{callback.dirpath}/") for path in paths)
        for path in paths:
            assert Net.load_from_checkpoint(path).hparams == {"width": 3}
            content = torch.load(path)
            assert content["hyper_parameters"] == {"width": 3} and content["optimizer_states"]
            user.test(Net(), samples(), ckpt_path=path, verbose=False)
            assert user.ckpt_path == path
    scores = [[value.item() for value in callback.best_k_models.values()] for callback in (stock, own)]
    assert scores[0] == scores[1] and len(scores[0]) == bool(mode)
    differing = {name for name in values[own] if values[stock][name] != values[own][name]}
    assert {name for name in differing if not name.endswith("_path")} == {"dirpath", "state_key"} | (
        set() if mode else {"save_last"}
    )
    assert len(logger.saved) == 3 and logger.saved[-1] == (own.last_model_path, own.best_model_path)
    assert Path(own.last_model_path).parent.name == "step-00000018"
