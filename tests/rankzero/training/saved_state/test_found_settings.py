import json
from pathlib import Path

import pytest
import torch
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.tuner.lr_finder import _LRFinder
from resuming import Net, fit_in, fit_stock
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rankzero import Trainer
from rankzero.messages import RequestError
from rankzero.training.fit_loop import fit_loop_of
from running import fit_in_process
from stock import QUIET, differences

pytestmark = pytest.mark.usefixtures("finders_without_gc")
SIZE = ("--trainer.callbacks+=BatchSizeFinder", "--trainer.callbacks.max_trials=5")
RATE = ("--trainer.callbacks+=LearningRateFinder", "--trainer.callbacks.num_training_steps=30")
DATA = ("--model.samples=160",)


def files(folder):
    """Returns the paths of a run's files, without event files (named after time and process) and step numbers."""
    paths = {path.relative_to(folder) for path in folder.rglob("*") if "events.out" not in path.name}
    return {str(path).replace(path.name, "step") if path.name.startswith("step-") else str(path) for path in paths}


@pytest.mark.parametrize("finders", [SIZE, RATE, SIZE + RATE], ids=["batch size", "rate", "both"])
def test_trials_do_not_count_and_found_settings_are_used(tmp_path, finders):
    run = fit_in(tmp_path / "ours", *finders, *DATA)
    stock = fit_stock(tmp_path / "stock", *finders, *DATA)
    assert differences(run["record"], stock["record"]) == []
    assert differences(run["weights"], stock["weights"]) == []
    summary = run["summary"]
    size = 32 if finders[0] == SIZE[0] else 8
    assert (summary["samples"], summary["steps"]) == (4 * 160, 4 * 160 // size)
    assert summary["ledger"] == [f"epoch {number}: 160 of 160 samples, each once" for number in range(1, 5)]
    curves = EventAccumulator(str(tmp_path / "ours/runs/x/tensorboard")).Reload()
    assert [event.step for event in curves.Scalars("loss_epoch")][-1] == summary["steps"] - 1
    assert curves.Scalars("train/lr")[0].value == pytest.approx(run["record"][0]["rates"][0])
    fit_in(tmp_path / "plain", *DATA, f"--model.batch_size={size}")
    differing_files = files(tmp_path / "ours") ^ files(tmp_path / "plain")
    assert all("checkpoints/step" in name for name in differing_files), differing_files


@pytest.mark.parametrize("finder", [SIZE, RATE], ids=["batch size", "rate"])
def test_error_in_a_trial_fails_the_run(cwd, finder, monkeypatch):
    monkeypatch.setattr(Net, "training_step", lambda self, batch, batch_idx: {}["no such layer"])
    with pytest.raises(KeyError, match="no such layer"):
        fit_in_process("--model", "resuming.Net", "--run", "x", *finder)
    assert json.loads(Path("runs/x/summary.json").read_text())["status"] == "failed"
    assert "no such layer" in Path("runs/x/logs/rank-000.log").read_text()
    assert not list(cwd.glob(".*.ckpt"))


def request_stop_in_trial(self, batch, batch_idx):
    """Requests one stop, in the third batch of a trial."""
    loop = fit_loop_of(self.trainer)
    if loop.is_trial and batch_idx == 2 and not Path("asked").exists():
        Path("asked").touch()
        loop.extra_subscribers[-1].control_channel.request_stop("a test")
    return self.loss(batch)


@pytest.mark.parametrize("finder", [SIZE, RATE], ids=["batch size", "rate"])
def test_run_stopped_in_a_trial_saves_nothing_and_restarts(cwd, finder, monkeypatch):
    monkeypatch.setattr(Net, "training_step", request_stop_in_trial)
    steps = ("--trainer.callbacks.steps_per_trial=6",) if finder == SIZE else ()
    command = ("--model", "resuming.Net", "--run", "x", "--epochs", "1", *finder, *steps)
    assert fit_in_process(*command) == 75
    assert not list(Path("runs/x/checkpoints").glob("*")) and not list(cwd.glob(".*"))
    assert fit_in_process(*command) == 0
    assert json.loads(Path("runs/x/summary.json").read_text())["samples"] == 64


@pytest.mark.parametrize("flag", ["--batch_size", "--global_batch_size"])
def test_batch_size_flag_with_a_batch_size_finder_is_refused(cwd, flag):
    with pytest.raises(RequestError, match=f"{flag} 16 with a BatchSizeFinder"):
        fit_in_process("--model", "resuming.Net", *SIZE, flag, "16")
    assert not list(cwd.iterdir())


def test_a_finder_added_to_a_resumed_run_does_not_run(cwd, capsys):
    command = ("--model", "resuming.Net", "--run", "x")
    fit_in_process(*command, "--epochs", "1")
    fit_in_process(*command, "--epochs", "2", *RATE)
    assert "LearningRateFinder does not run again: a resumed run keeps its learning rate" in capsys.readouterr().out
    (newest,) = Path("runs/x/checkpoints").glob("step-00000016")
    assert torch.load(newest / "state.pt", weights_only=True)["optimizer_states"][0]["param_groups"][0]["lr"] == 0.05


def test_a_resumed_run_keeps_what_a_tuner_found_before_its_first_start(script_folder, monkeypatch):
    for epochs, found in ((1, 0.03), (2, 0.07)):
        monkeypatch.setattr(_LRFinder, "suggestion", lambda self, found=found: found)
        trainer, model = Trainer(name="x", max_epochs=epochs, **QUIET), Net(samples=160)
        Tuner(trainer).lr_find(model, num_training=30)
        trainer.fit(model)
        assert model.lr == 0.03
