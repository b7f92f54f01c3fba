from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from boring_models import DropoutNet as Net
from boring_models import samples
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from rankzero import Trainer
from rankzero.messages import RequestError
from rankzero.runs.checkpoints.manifest import MANIFEST
from stock import QUIET


def trained(kind, **settings):
    model = Net()
    trainer = kind(max_epochs=2, **QUIET, **settings)
    trainer.fit(model, samples(), samples())
    return trainer, model


def test_ckpt_path_may_be_last_best_or_a_path(script_folder):
    trainer, model = trained(Trainer, name="x", keep_best="min:val_loss", keep=10)
    last = trainer.test(model, samples(), verbose=False)
    assert trainer.test(Net(), samples(), ckpt_path="last", verbose=False) == last
    best = Path(trainer.checkpoint_callback.best_model_path)
    assert best.parent.resolve() == (script_folder / "runs/x/checkpoints").resolve()
    by_path = trainer.test(Net(), samples(), ckpt_path=best, verbose=False)
    assert trainer.test(Net(), samples(), ckpt_path="best", verbose=False) == by_path
    other_trainer = Trainer(name="y", max_epochs=3, **QUIET)
    other_trainer.fit(Net(), samples(), samples(), ckpt_path=best)
    assert other_trainer.current_epoch == 3 and other_trainer.global_step == 18


def test_missing_ckpt_path_is_refused(script_folder):
    trainer, model = trained(Trainer, name="x")
    with pytest.raises(RequestError, match="kept no best checkpoint"):
        trainer.test(model, samples(), ckpt_path="best")
    with pytest.raises(RequestError, match="there is no such file or folder"):
        trainer.test(model, samples(), ckpt_path="runs/nothing")
    with pytest.raises(RequestError, match="there is no such file or folder"):
        Trainer(name="y", **QUIET).fit(model, samples(), ckpt_path="nothing.ckpt")
    assert not (script_folder / "runs/y").exists()


def test_ckpt_path_best_uses_a_users_own_model_checkpoint(script_folder):
    model_checkpoint = ModelCheckpoint(dirpath="own", monitor="val_loss")
    trainer = Trainer(name="x", max_epochs=2, callbacks=model_checkpoint, **QUIET)
    model = Net()
    trainer.fit(model, samples(), samples())
    assert model_checkpoint.best_model_path
    assert trainer.test(Net(), samples(), ckpt_path="best", verbose=False) == trainer.test(
        Net(), samples(), ckpt_path=model_checkpoint.best_model_path, verbose=False
    )


def test_evaluation_without_a_model_loads_the_best_checkpoint_if_the_run_keeps_one(script_folder):
    for name, settings in (("best", {"keep_best": "max:val_loss"}), ("last", {})):
        trainer, model = trained(Trainer, name=name, **settings)
        newest_result = trainer.test(model, samples(), verbose=False)
        with torch.no_grad():
            model.layer.weight.zero_()
        with_zeroed_weights = trainer.test(model, samples(), verbose=False)
        without_model = trainer.test(dataloaders=samples(), verbose=False)
        if settings:
            best_result = trainer.test(Net(), samples(), ckpt_path="best", verbose=False)
            assert without_model == best_result != newest_result
        else:
            assert without_model == with_zeroed_weights != newest_result


def test_ckpt_path_last_is_the_newest_complete_checkpoint_or_none(script_folder):
    trainer, _ = trained(Trainer, name="x", keep=10)
    saved = sorted(Path("runs/x/checkpoints").iterdir())
    for name in ("last", "hpc"):
        assert trainer._checkpoint_choice.resolve(name) == str(saved[1])
    (saved[1] / "state.pt").write_bytes(b"")
    assert trainer._checkpoint_choice.resolve("last") == str(saved[0])
    (saved[0] / MANIFEST).unlink()
    assert trainer._checkpoint_choice.resolve("last") is None


def test_ckpt_path_may_be_a_file_a_checkpoint_or_a_run(script_folder, monkeypatch):
    trainer, _ = trained(Trainer, name="x")
    trainer.save_checkpoint("own.ckpt")
    Path("own.bin").write_bytes(Path("own.ckpt").read_bytes())
    newest = str(Path("runs/x/checkpoints/step-00000012"))
    for name in ("own.ckpt", "own.bin"):
        assert trainer._checkpoint_choice.resolve(name) == name
    assert trainer._checkpoint_choice.resolve("runs/x") == trainer._checkpoint_choice.resolve(newest) == newest
    monkeypatch.setenv("HOME", str(script_folder))
    assert trainer._checkpoint_choice.resolve("~/own.bin") == str(script_folder / "own.bin")


def test_fit_without_ckpt_path_loads_nothing_unlike_stock_lightning(script_folder):
    """Lightning loads the checkpoint that an `OnExceptionCheckpoint` has left."""
    settings = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, **QUIET}
    stock_trainer = pl.Trainer(**settings)
    stock_trainer.fit(Net(), samples(), samples())
    for kind in (pl.Trainer, Trainer):
        stock_trainer.save_checkpoint("on_exception.ckpt")
        trainer = kind(**{**settings, "enable_checkpointing": True}, callbacks=[OnExceptionCheckpoint(".")])
        batches = []
        model = Net()
        model.on_train_batch_start = lambda batch, batch_idx, batches=batches: batches.append(batch_idx)
        trainer.fit(model, samples(), samples())
        loaded = trainer.ckpt_path is not None
        assert (loaded, batches) == ((True, []) if kind is pl.Trainer else (False, [*range(6)]))
