import os
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from boring_models import DropoutNet as Net
from boring_models import samples, train
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from rankzero import Trainer
from rankzero.checkpoints.manifest import MANIFEST
from rankzero.messages import RequestError
from stock import QUIET


def test_the_best_checkpoint_is_found_by_name_and_by_path(script_folder):
    trainer, _ = train(keep_best="min:val_loss", keep=10)
    best = Path(trainer.checkpoint_callback.best_model_path)
    assert best.parents[1] == script_folder / "runs/x/checkpoints"
    for ckpt_path in (best, best.parent):
        by_path = trainer.test(Net(), samples(), ckpt_path=ckpt_path, verbose=False)
        assert trainer.ckpt_path == ckpt_path
        assert trainer.test(Net(), samples(), ckpt_path="best", verbose=False) == by_path
        assert trainer.ckpt_path == str(best)
    for ckpt_path in (best, str(best)):
        resumed = Trainer(name="y", max_epochs=3, resume="never", **QUIET)
        resumed.fit(Net(), samples(), samples(), ckpt_path=ckpt_path)
        assert (resumed.ckpt_path, resumed.global_step) == (ckpt_path, 18)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"enable_checkpointing": False}, "no checkpoint callback"),
        ({"fast_dev_run": True}, "fast_dev_run saves no checkpoints"),
        ({"callbacks": ModelCheckpoint(save_top_k=0)}, "no best checkpoint was saved"),
        ({"keep_best": "min:missing"}, "no best checkpoint was saved"),
    ],
    ids=("off", "fast_dev_run", "none_kept", "missing_metric"),
)
def test_evaluation_without_a_model_and_a_best_checkpoint_is_refused(script_folder, settings, found):
    trainer, _ = train(name=None, **settings)
    for evaluation in (trainer.test, partial(trainer.validate, ckpt_path="best"), trainer.predict):
        with pytest.raises(RequestError, match=found):
            evaluation(dataloaders=samples())


@pytest.mark.parametrize("ckpt_path", ["runs/nothing", "nothing.ckpt", "memory://nothing.ckpt"])
def test_a_missing_ckpt_path_is_a_file_not_found_error_with_what_to_type(script_folder, capfd, ckpt_path):
    trainer, model = train(quiet=True)
    for call in (trainer.test, Trainer(name="y", quiet=True, **QUIET).fit):
        with pytest.raises(FileNotFoundError, match="there is no such file") as caught:
            call(model, samples(), ckpt_path=ckpt_path)
        assert isinstance(caught.value, RequestError)
    with pytest.raises(RequestError, match="Protocol not known: unknown"):
        trainer.test(model, samples(), ckpt_path="unknown://x.ckpt")
    assert "Traceback" not in capfd.readouterr().err
    assert not (script_folder / "runs/y").exists()


@pytest.mark.parametrize("save_last", [True, "link"])
def test_last_is_the_newest_of_a_users_and_rankzeros_checkpoints(script_folder, save_last):
    own = ModelCheckpoint("own", save_last=save_last)
    trainer, model = train(callbacks=own, enable_checkpointing=None)
    trainer.test(model, samples(), ckpt_path="last", verbose=False)
    for seconds, end in ((None, "own/last.ckpt"), ((0, 0), "/checkpoints/step-00000012/state.pt")):
        os.utime(own.last_model_path, seconds)
        assert trainer._checkpoint_choice.resolve("last").endswith(end)


def test_evaluation_without_a_model_prints_and_loads_the_best_checkpoint(script_folder, capfd):
    for settings in ({"keep_best": "max:val_loss"}, {}):
        trainer, model = train(name=None, **settings)
        newest_result = trainer.test(model, samples(), verbose=False)
        with torch.no_grad():
            model.layer.weight.zero_()
        without_model = trainer.test(dataloaders=samples(), verbose=False)
        path = trainer.checkpoint_callback.best_model_path
        assert f"rankzero: test uses the checkpoint {path}\n" in capfd.readouterr().out
        assert without_model == trainer.test(Net(), samples(), ckpt_path="best", verbose=False)
        assert (without_model != newest_result) is bool(settings)


def test_ckpt_path_may_be_a_file_a_checkpoint_a_run_or_its_newest_complete_checkpoint(script_folder, monkeypatch):
    trainer, _ = train(keep=10)
    resolve, (older, newest) = trainer._checkpoint_choice.resolve, sorted(Path("runs/x/checkpoints").iterdir())
    trainer.save_checkpoint("own.ckpt")
    Path("own.bin").write_bytes(Path("own.ckpt").read_bytes())
    assert [resolve(name) for name in ("own.ckpt", "own.bin")] == ["own.ckpt", "own.bin"]
    monkeypatch.setenv("HOME", str(script_folder))
    assert resolve("~/own.bin") == str(script_folder / "own.bin")
    assert newest.name == "step-00000012"
    files = [str(path.absolute() / "state.pt") for path in (older, newest)]
    assert [resolve(name) for name in ("runs/x", str(newest), "last")] == [str(newest)] * 2 + [files[1]]
    Path("own.ckpt").rename("hpc_ckpt_3.ckpt")
    assert resolve("hpc") == str(script_folder / "hpc_ckpt_3.ckpt")
    (newest / "state.pt").write_bytes(b"")
    assert resolve("last") == files[0]
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
