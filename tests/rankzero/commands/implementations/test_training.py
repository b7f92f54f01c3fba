"""`fit` in this process: behavior and files of a run."""

import json
import sys

import pytest
import yaml

from rankzero.distributed.process.stop_signals import SIGNALS
from rankzero.messages import CannotStart, Exit
from running import fit_in_process

TOY = ("--model", "MLP", "--data", "Toy", "--epochs", "1")

USER_MODULE = """
import os
import signal
import time
from lightning.pytorch import Callback
from lightning.pytorch.demos.boring_classes import BoringDataModule as Data
from lightning.pytorch.demos.boring_classes import BoringModel as Net
from data_modules.in_memory import at_least

class Broken(Net):
    def training_step(self, batch, batch_idx):
        raise KeyError("in the step")

class Refuses(Data):
    def setup(self, stage):
        raise ValueError("not ours to explain")

class Late(Net):
    def training_step(self, batch, batch_idx):
        at_least(batch_idx, "batch_size", 1)
        return super().training_step(batch, batch_idx)

class Early(Net):
    def configure_optimizers(self):
        at_least(1, "batch_size", 0)

class Interrupted(Callback):
    pause = 0.0

    def on_train_batch_end(self, trainer, *arguments):
        time.sleep(self.pause)  # the ranks agree in another thread
        if trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGUSR1)
            self.pause = 0.05
"""


def summary(folder, run="x"):
    return json.loads((folder / "runs" / run / "summary.json").read_text())


@pytest.fixture
def user_module(cwd, monkeypatch):
    (cwd / "users.py").write_text(USER_MODULE)
    monkeypatch.syspath_prepend(cwd)
    yield
    sys.modules.pop("users", None)


def test_a_run_writes_its_files_and_its_summary(cwd, capsys):
    assert fit_in_process(*TOY, "--run", "x") == 0
    run = cwd / "runs" / "x"
    for name in ("run.json", "config.yaml", "attempts/0001/config.yaml", "logs/rank-000.log"):
        assert (run / name).is_file(), name
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000064"]
    assert list((run / "tensorboard").glob("events.*"))
    found = summary(cwd)
    expected = {
        "run": "x",
        "status": "finished",
        "epochs": 1,
        "steps": 64,
        "samples": 2048,
        "world_size": 1,
        "nodes": 1,
        "devices": 1,
        "launcher": "local",
        "attempts": 1,
        "checkpoint": "checkpoints/step-00000064",
    }
    assert {name: found[name] for name in expected} == expected
    assert found["samples_per_second"] > 0 and found["seconds"] > 0
    assert 0 < found["metrics"]["val/loss"] < 1
    out = capsys.readouterr().out
    assert "rankzero: local (no launcher's variables are set): 1 node x 1 process on cpu" in out
    assert "tensorboard --logdir runs --host localhost" in out and "run x: finished" in out


def test_tensorboard_receives_the_metrics_of_the_run(cwd):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    fit_in_process(*TOY[:-1], "2", "--run", "x")
    events = EventAccumulator(str(cwd / "runs/x/tensorboard")).Reload()
    names = events.Tags()["scalars"]
    assert {"train/loss", "val/loss", "val/mae", "train/samples_per_second", "train/lr"} <= set(names)
    assert [event.step for event in events.Scalars("val/loss")] == [63, 127]
    assert len(events.Scalars("train/loss")) == 12


def test_the_command_of_the_tutorial_trains_and_keeps_three_checkpoints(cwd):
    assert (
        fit_in_process(
            *["--model", "MLP", "--data", "Toy", "--total_epochs", "50", "--save_every", "10", "--batch_size", "32"]
        )
        == 0
    )
    found = summary(cwd, "MLP-Toy-1")
    assert (found["epochs"], found["steps"]) == (50, 50 * 64)
    kept = sorted(path.name for path in (cwd / "runs/MLP-Toy-1/checkpoints").iterdir())
    assert kept == ["step-00001920", "step-00002560", "step-00003200"]


def test_max_steps_alone_limits_a_run(cwd):
    fit_in_process("--model", "MLP", "--data", "Toy", "--data.count", "32", "--trainer.max_steps", "30", "--run", "x")
    assert (summary(cwd)["steps"], summary(cwd)["epochs"]) == (30, 30)


def test_a_failure_in_user_code_is_recorded_in_summary_and_log(cwd, user_module):
    with pytest.raises(KeyError):
        fit_in_process("--model", "users.Broken", "--data", "users.Data", "--epochs", "1", "--run", "x")
    assert summary(cwd)["status"] == "failed"
    assert "KeyError: 'in the step'" in (cwd / "runs/x/logs/rank-000.log").read_text()


def test_an_error_in_user_code_is_not_reported_as_a_wrong_request(cwd, user_module):
    with pytest.raises(ValueError, match="not ours to explain") as error:
        fit_in_process("--model", "users.Net", "--data", "users.Refuses")
    assert not isinstance(error.value, CannotStart)


def test_a_refused_attempt_leaves_the_files_of_an_earlier_attempt_unchanged(cwd):
    fit_in_process(*TOY, "--run", "x")
    before = {
        path: path.read_bytes() for path in (cwd / "runs").rglob("*") if path.is_file() and "logs" not in path.parts
    }
    with pytest.raises(CannotStart):
        fit_in_process("--model", "MLP", "--data", "Toy", "--run", "x", "--epochs", "2", "--data.count", "99")
    after = {
        path: path.read_bytes() for path in (cwd / "runs").rglob("*") if path.is_file() and "logs" not in path.parts
    }
    assert {path: after[path] for path in before} == before


def test_a_run_that_diverges_writes_a_valid_summary(cwd, capsys):
    fit_in_process(*TOY, "--run", "x", "--model.optimizer", "SGD", "--model.optimizer.lr", "1e20")
    text = (cwd / "runs/x/summary.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["metrics"]["val/loss"] is None
    assert "not finite" in capsys.readouterr().out


def test_max_steps_limits_a_run_without_an_epoch_limit(cwd, capsys):
    fit_in_process(
        "--model", "MLP", "--data", "Toy", "--trainer.max_epochs=-1", "--trainer.max_steps", "100", "--run", "x"
    )
    assert summary(cwd)["steps"] == 100 and "/-1" not in capsys.readouterr().out


def test_a_fast_dev_run_succeeds(cwd):
    assert fit_in_process(*TOY, "--run", "x", "--trainer.fast_dev_run", "true") == 0


def test_an_error_of_an_included_module_is_a_refusal_only_before_the_first_step(cwd, user_module):
    with pytest.raises(CannotStart, match="--data.batch_size is 0; it must be 1 or more"):
        fit_in_process("--model", "users.Early", "--data", "users.Data", "--run", "x")
    assert not (cwd / "runs").exists()
    with pytest.raises(ValueError, match="batch_size is 1; it must be 2 or more") as error:
        fit_in_process("--model", "users.Late", "--data", "users.Data", "--run", "x")
    assert not isinstance(error.value, CannotStart) and summary(cwd)["status"] == "failed"


def test_a_signal_stops_the_run_and_the_same_command_resumes_the_run(cwd, user_module, capsys):
    arguments = (*TOY, "--data.count", "2560", "--run", "x", "--trainer.callbacks", "users.Interrupted")
    SIGNALS.install()
    try:
        assert fit_in_process(*arguments) == Exit.STOPPED == 75
    finally:
        SIGNALS.close()
    stopped = summary(cwd)
    assert stopped["status"] == "stopped" and 3 <= stopped["steps"] < 80
    assert fit_in_process(*arguments) == 0
    assert (summary(cwd)["status"], summary(cwd)["steps"], summary(cwd)["attempts"]) == ("finished", 80, 2)


def test_print_config_trains_nothing(cwd, capsys):
    with pytest.raises(SystemExit) as exit_info:
        fit_in_process(*TOY, "--print_config")
    assert exit_info.value.code == 0 and not list(cwd.iterdir())
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["model"]["class_path"] == "lightning_modules.MLP" and config["trainer"]["max_epochs"] == 1


@pytest.mark.parametrize(
    ("arguments", "steps"), [((), 2), (("--data.batch_size", "16"), 4), (("--batch_size", "8"), 8)]
)
def test_the_batch_size_is_set_by_either_flag_or_by_the_data_module(cwd, arguments, steps):
    fit_in_process(*TOY, "--data.count", "64", "--run", "x", *arguments)
    assert (summary(cwd)["steps"], summary(cwd)["samples"]) == (steps, 64)
