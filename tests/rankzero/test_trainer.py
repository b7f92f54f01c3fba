import re
import shutil
import sys
from pathlib import Path
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest
import torch
from boring_models import DropoutNet, count_attempts, samples, summary_in, train
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

import rankzero
from rankzero import Trainer
from rankzero.checkpoints.manifest import read_manifest
from rankzero.distributed.coordination import session
from rankzero.distributed.coordination.session import Session
from rankzero.messages import RequestError
from rankzero.runs import attempt as attempt_module
from stock import QUIET, differences, every_hook


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"save_every": "often"}, 'save_every="often"'),
        ({"keep": 0}, "keep=0"),
        ({"time_limit": "soon"}, 'time_limit="soon"'),
        ({"name": "../x"}, 'name="../x"'),
        ({"accept_changed": ["data", "weather"]}, "data,weather"),
        ({"launcher": "torchrum"}, 'launcher="torchrun"'),
        ({"batch_size": 4, "global_batch_size": 8}, "batch_size=4 and global_batch_size=8"),
        ({"strategy": "fsdp"}, 'strategy="fsdp"'),
        ({"accelerator": "gpu"}, 'accelerator="gpu"'),
        ({"devices": 100_000}, "devices=100000"),
        ({"num_nodes": 2}, "num_nodes=2"),
        ({"max_epoch": 2, "loggers": None}, "type   max_epochs=..., logger=..."),
        ({"gpus": 2}, "type   devices=..."),
        ({"devices": "two"}, "devices='two'"),
        ({"accelerator": "gup"}, 'type   accelerator="gpu"'),
        ({"name": "my run"}, 'asked  name="my run"'),
    ],
)
def test_the_refusal_of_a_wrong_argument_names_the_argument(script_folder, monkeypatch, settings, message):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(RequestError) as error:
        Trainer(**{**QUIET, **settings})
    assert message in str(error.value)
    assert not (script_folder / "runs").exists()


def test_arguments_have_lightnings_order_and_environment_variables_and_none_is_a_default(script_folder, monkeypatch):
    monkeypatch.setenv("PL_TRAINER_MAX_EPOCHS", "1")
    assert Trainer(**QUIET).max_epochs == 1 and Trainer(max_epochs=2, **QUIET).max_epochs == 2
    assert Trainer("cpu", "auto", 1, root=None, quiet=None).run.path.parent == Path("runs")


def test_another_trainer_with_the_same_name_resumes_the_run_or_restores_a_finished_run(script_folder, capsys):
    uninterrupted, model = train(name="whole")
    train(max_epochs=1)
    resumed, resumed_model = train()
    assert resumed.global_step == uninterrupted.global_step == 12
    assert differences(resumed_model.state_dict(), model.state_dict()) == []
    assert "already finished" not in capsys.readouterr().out
    fresh = DropoutNet()
    torch.nn.init.zeros_(fresh.layer.weight)
    trainer, _ = train(fresh)
    assert torch.equal(fresh.layer.weight, model.layer.weight) and trainer.global_step == 12
    assert "already finished" in capsys.readouterr().out
    assert summary_in(script_folder)["attempts"] == 2


def test_a_finished_run_is_refused_with_another_seed_and_states_that_other_data_is_not_trained_on(
    script_folder, capsys, monkeypatch
):
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    train()
    train()
    assert "differs" not in capsys.readouterr().out
    trainer = Trainer(**QUIET, name="x", max_epochs=2, quiet=True)
    trainer.fit(DropoutNet(), samples(20))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("rankzero: run x is already finished") and "samples: was 21, is 20" in lines[2]
    monkeypatch.setenv("PL_GLOBAL_SEED", "2")
    with pytest.raises(RequestError, match="keeps its seed, 1"):
        train()


@pytest.mark.parametrize(
    ("method", "arguments", "named", "message"),
    [
        ("fit", [samples(4), BoringModel()], {}, "`model` must be a `LightningModule` .* got `DataLoader`"),
        ("test", [torch.nn.Linear(2, 2)], {}, "got `Linear`"),
        ("fit", [BoringModel()], {"train_dataloader": samples()}, "type   train_dataloaders="),
        ("predict", [BoringModel()], {"return_prediction": True}, "type   return_predictions="),
        ("fit", [BoringModel(), BoringDataModule], {}, r"type   BoringDataModule\(\)"),
        ("validate", [BoringModel()], {"datamodule": samples()}, "type   dataloaders="),
        ("fit", [BoringModel(), samples(), BoringDataModule()], {}, "type   datamodule="),
    ],
)
def test_wrong_arguments_of_a_method_are_refused_before_a_run_begins(script_folder, method, arguments, named, message):
    with pytest.raises(TypeError, match=message):
        getattr(Trainer(**QUIET, name="x"), method)(*arguments, **named)
    assert not (script_folder / "runs").exists()


def test_settings_that_lightning_refuses_are_reported_without_a_traceback(script_folder, capsys):
    with pytest.raises(MisconfigurationException) as raised:
        Trainer(**QUIET | {"max_epochs": -5})
    with pytest.raises(SystemExit, match="2"):
        sys.excepthook(raised.type, raised.value, raised.tb)
    assert capsys.readouterr().err.startswith("rankzero: cannot start\n  `max_epochs` must be")


def test_a_checkpoint_of_another_shape_is_refused_without_traceback_and_the_run_stays_as_it_was(script_folder, capsys):
    train(max_epochs=1)
    model = DropoutNet()
    model.layer = torch.nn.Linear(32, 5)
    with pytest.raises(RuntimeError, match="size mismatch") as raised:
        train(model)
    assert count_attempts(script_folder) == 1
    with pytest.raises(SystemExit, match="2"):
        sys.excepthook(raised.type, raised.value, raised.tb)
    assert "name=ANOTHER-NAME" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "lost", "start"),
    [
        ({"enable_checkpointing": False}, "-", "starts from the beginning"),
        ({}, "step-*", "starts from the beginning"),
        ({}, "step-00000012", "resumes from the newest"),
    ],
)
def test_a_finished_run_without_its_last_checkpoint_trains_again(script_folder, settings, lost, start, capsys):
    for attempt in (1, 2):
        model, locks = DropoutNet(), []
        model.on_train_end = lambda locks=locks: locks.append(len(list(script_folder.glob("runs/.x.lock"))))
        trainer, _ = train(model, **settings)
        assert (trainer.run.attempt, count_attempts(script_folder), locks) == (attempt, attempt, [1])
        assert trainer.global_step == 12
        for path in (script_folder / "runs/x/checkpoints").glob(lost):
            shutil.rmtree(path)
    out = capsys.readouterr().out
    assert "already finished" not in out and f"no checkpoint of its last step; it {start}" in out


def test_fit_can_be_called_again_after_a_refusal(script_folder, monkeypatch):
    trainer = Trainer(name="x", max_epochs=1, **QUIET)
    with pytest.raises(RequestError, match="there is no such file or folder"):
        trainer.fit(BoringModel(), samples(), ckpt_path="typo")
    with monkeypatch.context() as patch, pytest.raises(RequestError, match="too large"):
        patch.setattr(attempt_module, "resume_order", Mock(side_effect=RequestError("9", "that is too large", "8")))
        trainer.fit(BoringModel(), samples())
    trainer.fit(DropoutNet(), samples())
    assert trainer.global_step == 6 and count_attempts(script_folder) == 1
    config = read_manifest(script_folder / "runs/x/checkpoints/step-00000006")["rankzero"]["config"]
    assert config["model"]["class_path"].endswith("DropoutNet")


def test_a_trainer_that_restored_a_finished_run_can_train_from_another_checkpoint(script_folder):
    train(save_every="3steps")
    trainer, model = Trainer(name="x", max_epochs=2, **QUIET), DropoutNet()
    for _ in range(2):
        trainer.fit(model, samples())
        assert (trainer.global_step, count_attempts(script_folder)) == (12, 1)
    trainer.fit(model, samples(), ckpt_path=script_folder / "runs/x/checkpoints/step-00000009")
    assert (trainer.global_step, count_attempts(script_folder)) == (12, 2) and trainer.outcome.has_trained


class FailingNet(DropoutNet):
    def training_step(self, batch, batch_idx):
        if self.global_step == 3:
            raise KeyError("the second") from LookupError("the first")
        return super().training_step(batch, batch_idx)


def test_an_error_in_user_code_is_raised_unchanged(script_folder):
    with pytest.raises(KeyError, match="the second") as raised:
        train(FailingNet())
    assert isinstance(raised.value.__cause__, LookupError)
    assert summary_in(script_folder)["status"] == "failed"
    assert train(save_every="2steps")[0].global_step == 12


def test_a_trainer_trains_again_after_errors_before_the_first_checkpoint(script_folder):
    trainer = Trainer(name="x", max_epochs=2, **QUIET)
    for _ in range(2):
        with pytest.raises(KeyError, match="the second"):
            trainer.fit(FailingNet(), samples())
    trainer.fit(DropoutNet(), samples())
    assert trainer.global_step == 3 + 12 and summary_in(script_folder)["status"] == "finished"
    assert [entry.split(":")[0] for entry in trainer._ledger.entries] == ["epoch 1", "epoch 2"]
    assert trainer.run.checkpoint(15).is_dir()


def test_a_stop_raises_system_exit_and_the_same_script_resumes_the_run(script_folder, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(rankzero.Stopped) as stopped:
        patch.setattr(DropoutNet, "stops_at", 3)
        train(stopped_exit_code=99)
    assert isinstance(stopped.value, SystemExit) and stopped.value.code == 99
    session._close_coordinator(None)
    monkeypatch.setattr(Session, "current", None)  # as if the same script were started again
    resumed, _ = train()
    assert resumed.global_step == 12 and resumed.run.attempt == 2


def test_seed_everything_after_building_the_trainer_sets_the_seed_of_the_order(script_folder):
    def order(seed):
        trainer = Trainer(name=f"seed-{seed}", max_epochs=1, **QUIET)
        pl.seed_everything(seed)
        trainer.fit(DropoutNet(), samples(shuffle=True))
        return list(trainer.plan.order)

    assert order(1) != order(2)


def test_a_resumed_run_without_a_seed_keeps_its_order_and_torchs_seed_determines_another(script_folder, monkeypatch):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    loader = DataLoader(torch.rand(21, 32), batch_size=4, shuffle=True)

    def fit(name, epochs):
        trainer = Trainer(name=name, max_epochs=epochs, **QUIET)
        trainer.fit(BoringModel(), loader)
        return trainer.plan.seed, list(trainer.plan.order)

    torch.manual_seed(1)
    first, (seed, _) = fit("first", 2), fit("part", 1)
    assert first[0] != seed == fit("part", 2)[0]
    torch.manual_seed(1)
    assert fit("again", 2) == first  # as in stock Lightning


def test_the_users_callbacks_come_after_the_sample_ledger_and_before_saving(script_folder):
    user_callbacks = [every_hook([]), ModelCheckpoint(dirpath="own")]
    kinds = [type(callback).__name__ for callback in Trainer(callbacks=user_callbacks, **QUIET).callbacks]
    assert kinds[:5] == ["HookBridge", "ReportFailure", "KeepFound", "SampleLedger", "EveryHook"]
    assert kinds[-2:] == ["ModelCheckpoint", "CheckpointCallback"]


def test_a_quiet_run_prints_one_line(script_folder, capsys):
    train(quiet=True)
    captured = capsys.readouterr()
    assert re.fullmatch(r"run x: finished, loss \S+, val_loss \S+, runs/x\n", captured.out) and captured.err == ""
    assert "quiet" not in (script_folder / "runs/x/config.yaml").read_text()


def test_a_quiet_run_states_how_to_resume_and_what_differs(script_folder, capsys):
    model = DropoutNet()
    model.stops_at = 3
    with pytest.raises(rankzero.Stopped):
        train(model, quiet=True)
    out = capsys.readouterr().out
    assert out.startswith("run x: stopped, ") and out.endswith('runs/x; to resume: the same script with name="x"\n')
    with pytest.raises(rankzero.Stopped):  # the request to stop stays in force
        train(max_epochs=1, quiet="yes")
    out = capsys.readouterr().out
    assert out.startswith("rankzero: changed since the checkpoint: max_epochs=2 -> 1\nrun x: stopped, ")
