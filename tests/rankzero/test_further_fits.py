"""Further calls of `fit`: on one Trainer, in one interactive program, and of one run with other settings."""

import os
import shutil
import signal
import sys
import time

import lightning.pytorch as pl
import pytest
import torch
from boring_models import DropoutNet, count_attempts, samples, summary_in, train
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.utils import prune

from rankzero import Trainer
from rankzero.messages import RequestError
from stock import differences, every_hook


def curriculum(trainer, model):
    trainer.fit_loop.max_epochs = 4
    trainer.fit(model, samples(33), samples())


def more_steps(trainer, model):
    trainer.fit_loop.epoch_loop.max_steps, trainer.fit_loop.max_epochs = 15, 9
    trainer.fit(model, samples(), samples())


def counters_set_back(trainer, model):
    trainer.fit_loop.epoch_progress.reset()
    trainer.fit(model, samples(16), samples())


def prune_and_train(trainer, model):
    prune.l1_unstructured(model.layer, "weight", 0.5)
    curriculum(trainer, model)


def own_checkpoint_and_other_data(trainer, model):
    trainer.save_checkpoint("mine.ckpt")
    curriculum(trainer, model)
    trainer.fit(model, samples(37), ckpt_path="mine.ckpt")


@pytest.mark.parametrize("then", [more_steps, counters_set_back, prune_and_train])
def test_a_further_fit_trains_as_stock_lightning_does(script_folder, then):
    stock_calls, calls, states = [], [], []
    for kind, seen in ((pl.Trainer, stock_calls), (Trainer, calls)):
        settings = {"max_steps": 8} if then is more_steps else {}
        files = {"logger": False, "enable_checkpointing": False} if kind is pl.Trainer else {}
        trainer, model = train(kind=kind, callbacks=[every_hook(seen)], **settings, **files)
        then(trainer, model)
        states.append(trainer.lightning_module.state_dict())
    assert differences(*states) == [] and differences(calls, stock_calls) == [] and calls
    assert count_attempts(script_folder) == summary_in(script_folder)["part"] == 2


class Killed(Exception):  # noqa: N818
    pass


@pytest.mark.parametrize(
    ("then", "has_own"), [(prune_and_train, False), (prune_and_train, True), (own_checkpoint_and_other_data, False)]
)
def test_a_script_with_several_fits_resumes_in_the_part_in_which_it_was_killed(
    script_folder, monkeypatch, then, has_own
):
    """Its tests of checkpoints between the fits have the same results, with a user's ModelCheckpoint or Rankzero's."""

    def script(name, kill_at=None):
        torch.manual_seed(5)
        own = [ModelCheckpoint(monitor="val_loss", save_last=True, dirpath=f"own/{name}")] if has_own else []
        model, train_batch = DropoutNet(), DropoutNet.training_step

        def training_step(self, batch, batch_idx):
            if self.global_step == kill_at:
                raise Killed
            return train_batch(self, batch, batch_idx)

        with monkeypatch.context() as patch:
            patch.setattr(DropoutNet, "training_step", training_step)
            trainer, _ = train(model, name=name, save_every="4steps", keep=2, keep_best="min:val_loss", callbacks=own)
            tests = [test_of(trainer, "best"), test_of(trainer, "last")]
            if kill_at == "between":
                raise Killed
            then(trainer, model)
        return dict(trainer.callback_metrics), model, [*tests, test_of(trainer, "best")]

    def test_of(trainer, ckpt_path):
        return trainer.test(DropoutNet(), samples(), ckpt_path=ckpt_path, verbose=False)

    metrics, model, tests = script("whole")
    for kill_at in (5, "between", 12, 13, 25):
        with pytest.raises(Killed):
            script("x", kill_at)
        resumed_metrics, resumed_model, resumed_tests = script("x")
        assert (resumed_metrics, resumed_tests) == (metrics, tests), kill_at
        assert differences(resumed_model.state_dict(), model.state_dict()) == [], kill_at
        assert summary_in(script_folder)["ledger"] == summary_in(script_folder, "whole")["ledger"]
        shutil.rmtree("runs/x")
        shutil.rmtree("own/x", ignore_errors=True)


class SweptNet(DropoutNet):
    def __init__(self, rate=0.1):
        super().__init__()
        self.rate = rate


def test_a_finished_run_is_restored_for_the_same_settings_only_and_a_smoke_run_is_not_resumed(
    script_folder, monkeypatch
):
    first, _ = train(SweptNet())
    again, _ = train(SweptNet(), devices=1)
    assert again.callback_metrics == first.callback_metrics and len(first.callback_metrics) == 4
    with pytest.raises(RequestError, match=r"rate=0.1 -> 0.2(?s:.*)name=NAME(?s:.*)resume=.never"):
        train(SweptNet(0.2))
    with pytest.raises(RequestError, match="gradient_clip_val=None -> 1"):
        train(SweptNet(), gradient_clip_val=1)
    with pytest.raises(RequestError, match="precision=None -> bf16-mixed"):
        train(SweptNet(), precision="bf16-mixed")
    with monkeypatch.context() as patch, pytest.raises(RequestError, match="code"):
        patch.setattr(SweptNet, "validation_step", DropoutNet.test_step)
        train(SweptNet())
    train(SweptNet(0.2), max_epochs=3)
    train(name="smoke", limit_train_batches=2, max_epochs=1)
    with pytest.raises(RequestError, match="to resume run smoke with all data(?s:.*)limit_train_batches=2"):
        train(name="smoke")
    train(name="smoke", resume="never")


def test_an_interactive_program_trains_again_after_an_interrupt(script_folder, monkeypatch):
    class Interrupted(DropoutNet):
        def training_step(self, batch, batch_idx):
            if self.global_step == 3:
                os.kill(os.getpid(), signal.SIGINT)
                while not self.trainer.session.coordinator.control_channel.stop_reason:
                    time.sleep(0.01)
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(KeyboardInterrupt):
        train(Interrupted())
    assert summary_in(script_folder)["status"] == "stopped"
    assert train(name="other")[0].global_step == 12
    resumed, _ = train(Interrupted())
    assert resumed.global_step == 12 and summary_in(script_folder)["ledger"][0].endswith("each once")
