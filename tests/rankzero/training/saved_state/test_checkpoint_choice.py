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


def trained(**settings):
    trainer, model = Trainer(max_epochs=2, **QUIET, **settings), Net()
    trainer.fit(model, samples(), samples())
    return trainer, model


def test_ckpt_path_may_be_last_best_or_a_path(script_folder):
    trainer, model = trained(name="x", keep_best="min:val_loss", keep=10)
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
    trainer, model = trained(name="x")
    with pytest.raises(RequestError, match="kept no best checkpoint"):
        trainer.test(model, samples(), ckpt_path="best")
    with pytest.raises(RequestError, match="there is no such file or folder"):
        trainer.test(model, samples(), ckpt_path="runs/nothing")
    with pytest.raises(RequestError, match="there is no such file or folder"):
        Trainer(name="y", **QUIET).fit(model, samples(), ckpt_path="nothing.ckpt")
    assert not (script_folder / "runs/y").exists()


def test_ckpt_path_best_uses_a_users_own_model_checkpoint(script_folder):
    model_checkpoint = ModelCheckpoint(dirpath="own", monitor="val_loss")
    trainer, _ = trained(name="x", callbacks=model_checkpoint)
    assert model_checkpoint.best_model_path
    by_path = trainer.test(Net(), samples(), ckpt_path=model_checkpoint.best_model_path, verbose=False)
    assert trainer.test(Net(), samples(), ckpt_path="best", verbose=False) == by_path


def test_evaluation_without_a_model_loads_the_best_checkpoint_if_the_run_keeps_one(script_folder):
    for name, settings in (("best", {"keep_best": "max:val_loss"}), ("last", {})):
        trainer, model = trained(name=name, **settings)
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


def test_ckpt_path_may_be_a_file_a_checkpoint_a_run_or_its_newest_complete_checkpoint(script_folder, monkeypatch):
    trainer, _ = trained(name="x", keep=10)
    resolve, (older, newest) = trainer._checkpoint_choice.resolve, sorted(Path("runs/x/checkpoints").iterdir())
    trainer.save_checkpoint("own.ckpt")
    Path("own.bin").write_bytes(Path("own.ckpt").read_bytes())
    assert [resolve(name) for name in ("own.ckpt", "own.bin")] == ["own.ckpt", "own.bin"]
    monkeypatch.setenv("HOME", str(script_folder))
    assert resolve("~/own.bin") == str(script_folder / "own.bin")
    assert newest.name == "step-00000012"
    assert [resolve(name) for name in ("runs/x", str(newest), "last", "hpc")] == [str(newest)] * 4
    (newest / "state.pt").write_bytes(b"")
    assert resolve("last") == str(older)
    (older / MANIFEST).unlink()
    assert resolve("last") is None


def test_fit_without_ckpt_path_loads_nothing_unlike_stock_lightning(script_folder):
    """Lightning loads the checkpoint that an `OnExceptionCheckpoint` has left."""
    settings = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, **QUIET}
    stock_trainer = pl.Trainer(**settings)
    stock_trainer.fit(Net(), samples(), samples())
    for kind in (pl.Trainer, Trainer):
        stock_trainer.save_checkpoint("on_exception.ckpt")
        trainer = kind(**{**settings, "enable_checkpointing": True}, callbacks=[OnExceptionCheckpoint(".")])
        model, batches = Net(), []
        model.on_train_batch_start = lambda batch, batch_idx, batches=batches: batches.append(batch_idx)
        trainer.fit(model, samples(), samples())
        loaded = trainer.ckpt_path is not None
        assert (loaded, batches) == ((True, []) if kind is pl.Trainer else (False, [*range(6)]))
