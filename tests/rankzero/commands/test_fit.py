"""`fit` in this process: behavior and files of a run."""

import io
from contextlib import redirect_stdout

import pytest
import yaml
from reported import scalars_of

from rankzero.distributed.process.stop_signals import SIGNALS
from rankzero.messages import CannotStart
from running import fit_in_folder, fit_in_process
from system.forks import summary

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


@pytest.fixture
def user_module(add_module):
    add_module("users", USER_MODULE)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run of two epochs, and what the run printed."""
    folder, out = tmp_path_factory.mktemp("trained"), io.StringIO()
    with redirect_stdout(out):
        fit_in_folder(folder, *TOY[:-1], "2", "--run", "x")
    return folder, out.getvalue()


def test_a_run_writes_its_files_its_summary_and_its_metrics(trained):
    folder, out = trained
    run = folder / "runs" / "x"
    for name in ("run.json", "config.yaml", "attempts/0001/config.yaml", "logs/rank-000.log"):
        assert (run / name).is_file(), name
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["step-00000064", "step-00000128"]
    found = summary(folder)
    expected = {"run": "x", "status": "finished", "epochs": 2, "steps": 128, "samples": 4096, "attempts": 1}
    expected |= {"world_size": 1, "nodes": 1, "devices": 1, "launcher": "local"}
    expected |= {"checkpoint": "checkpoints/step-00000128"}
    assert {name: found[name] for name in expected} == expected
    assert found["samples_per_second"] > 0 and found["seconds"] > 0
    assert 0 < found["metrics"]["val/loss"] < 1
    assert "rankzero: local (no launcher's variables are set): 1 node x 1 process on cpu" in out
    assert "tensorboard --logdir runs --host localhost" in out and "run x: finished" in out
    logged = scalars_of(run)
    assert {"train/loss", "val/loss", "val/mae", "train/samples_per_second", "train/lr"} <= logged.keys()
    assert list(logged["val/loss"]) == [63, 127] and len(logged["train/loss"]) == 12


def test_a_run_has_a_default_name_and_keeps_three_checkpoints(cwd):
    arguments = ["--model", "MLP", "--data", "Toy", "--data.count", "64", "--total_epochs", "5", "--save_every", "1"]
    assert fit_in_process(*arguments, "--batch_size", "32") == 0
    found = summary(cwd, "MLP-Toy-1")
    assert (found["epochs"], found["steps"]) == (5, 10)
    kept = sorted(path.name for path in (cwd / "runs/MLP-Toy-1/checkpoints").iterdir())
    assert kept == ["step-00000006", "step-00000008", "step-00000010"]


@pytest.mark.parametrize("limits", [(), ("--trainer.max_epochs=-1",)])
def test_max_steps_without_an_epoch_limit_limits_a_run(cwd, limits, capsys):
    arguments = ("--model", "MLP", "--data", "Toy", "--data.count", "32", "--trainer.max_steps", "5", *limits)
    fit_in_process(*arguments, "--run", "x")
    assert (summary(cwd)["steps"], summary(cwd)["epochs"]) == (5, 5) and "/-1" not in capsys.readouterr().out


def test_a_failure_in_user_code_is_recorded_in_summary_and_log_and_not_reported_as_a_wrong_request(cwd, user_module):
    with pytest.raises(KeyError):
        fit_in_process("--model", "users.Broken", "--data", "users.Data", "--epochs", "1", "--run", "x")
    assert summary(cwd)["status"] == "failed"
    assert "KeyError: 'in the step'" in (cwd / "runs/x/logs/rank-000.log").read_text()
    with pytest.raises(ValueError, match="not ours to explain") as error:
        fit_in_process("--model", "users.Net", "--data", "users.Refuses")
    assert not isinstance(error.value, CannotStart)


def test_a_fast_dev_run_succeeds_and_print_config_prints_the_default_classes_and_trains_nothing(cwd, capsys):
    with pytest.raises(SystemExit) as exit_info:
        fit_in_process("--epochs", "1", "--print_config")
    assert exit_info.value.code == 0 and not list(cwd.iterdir())
    config = yaml.safe_load(capsys.readouterr().out)
    defaults = {"model": "lightning_modules.ResNet", "data": "data_modules.Digits"}
    assert {name: config[name]["class_path"] for name in defaults} == defaults and config["trainer"]["max_epochs"] == 1
    assert fit_in_process(*TOY, "--run", "x", "--trainer.fast_dev_run", "true") == 0


def test_an_error_of_an_included_module_is_a_refusal_only_before_the_first_step(cwd, user_module):
    with pytest.raises(CannotStart, match="--data.batch_size is 0; it must be 1 or more"):
        fit_in_process("--model", "users.Early", "--data", "users.Data", "--run", "x")
    assert not (cwd / "runs").exists()
    with pytest.raises(ValueError, match="batch_size is 1; it must be 2 or more") as error:
        fit_in_process("--model", "users.Late", "--data", "users.Data", "--run", "x")
    assert not isinstance(error.value, CannotStart) and summary(cwd)["status"] == "failed"


def test_a_signal_stops_the_run_and_the_same_command_resumes_the_run(cwd, user_module, capsys, restore_signals):
    arguments = (*TOY, "--data.count", "2560", "--run", "x", "--trainer.callbacks", "users.Interrupted")
    SIGNALS.install()
    assert fit_in_process(*arguments, "--stopped_exit_code", "99") == 99
    stopped = summary(cwd)
    assert stopped["status"] == "stopped" and 3 <= stopped["steps"] < 80
    assert fit_in_process(*arguments) == 0
    assert (summary(cwd)["status"], summary(cwd)["steps"], summary(cwd)["attempts"]) == ("finished", 80, 2)


@pytest.mark.parametrize(("arguments", "steps"), [("", 2), ("--data.batch_size 16", 4), ("--batch_size 8", 8)])
def test_the_batch_size_is_set_by_either_flag_or_by_the_data_module(cwd, arguments, steps):
    fit_in_process(*TOY, "--data.count", "64", "--run", "x", *arguments.split())
    assert (summary(cwd)["steps"], summary(cwd)["samples"]) == (steps, 64)
