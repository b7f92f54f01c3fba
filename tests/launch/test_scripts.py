"""Runs the scripts in launch/ as a user does, and checks exit codes and terminal output."""

import json
import os
import re
import subprocess
import sys

import pytest

from running import evaluate_in_process, fit, fit_in_process, run, script


def test_the_default_run_learns_the_digits(cwd, capsys):
    result = fit(folder=cwd)
    summary = result.summary("ResNet-Digits-1")
    assert summary["status"] == "finished" and summary["metrics"]["val/accuracy"] >= 0.97
    assert "\nepoch 20/20 done" in result.out and "run ResNet-Digits-1: finished" in result.out and result.err == ""
    evaluate_in_process("--run", "ResNet-Digits-1", "--split", "test")
    metrics = json.loads((cwd / "runs/ResNet-Digits-1/evaluate-test.json").read_text())["metrics"]
    printed = re.search(r"test/accuracy +│ ([\d.]+)", capsys.readouterr().out)
    assert metrics["test/accuracy"] >= 0.95 and float(printed[1]) == pytest.approx(metrics["test/accuracy"], abs=1e-6)


def test_an_error_in_user_code_exits_with_code_1_and_shows_no_library_frames(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from lightning.pytorch.demos.boring_classes import BoringModel, BoringDataModule as Data\n"
        "class Net(BoringModel):\n    def training_step(self, batch, batch_idx):\n        raise KeyError('mine')\n"
    )
    result = fit("--model", "mine.Net", "--data", "mine.Data", folder=tmp_path, code=1)
    assert "raise KeyError('mine')" in result.err and "frames of libraries omitted" in result.err
    assert "site-packages" not in result.err
    assert result.summary()["status"] == "failed"


def test_a_terminal_shows_a_progress_bar(tmp_path):
    line = " ".join(["python", script("fit"), "--model", "MLP", "--data", "Toy", "--epochs", "2"])
    out = run("script", "--quiet", "--return", "--command", line, "/dev/null", folder=tmp_path).out
    assert "━" in out and "epoch 2/2" in out and "done" not in out


def test_print_config_and_model_help_print_once_and_exit_with_code_0(cwd):
    arguments = ("--print_config", "--devices", "2", "--model", "MLP", "--epochs", "1")
    config = fit(*arguments, folder=cwd).out
    assert config.count("class_path: lightning_modules.MLP") == 1
    (cwd / "c.yaml").write_text(config.replace("devices: 2", "devices: 1"))
    assert fit_in_process("--config", "c.yaml") == 0
    assert "--model.hidden_sizes" in fit("--model.help", "MLP", folder=cwd).out
    assert "--data.count" in fit("--data.help", "Toy", folder=cwd).out


HELP, EXPLAIN = (script("fit"), "--help"), (script("fit"), "--explain")


@pytest.mark.parametrize(
    ("command", "unbuffered"),
    [
        *((command, unbuffered) for command in (HELP, EXPLAIN) for unbuffered in ("", "1")),
        *((("-m", "rankzero", "--help"), ""), (("-m", "rankzero", "--version"), "1")),
    ],
)
def test_a_reader_that_closes_the_pipe_causes_no_traceback(command, unbuffered):
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with os.fdopen(writer, "wb") as closed_pipe:
        process = subprocess.run(
            [sys.executable, *command], stdout=closed_pipe, stderr=subprocess.PIPE, text=True, env=environment
        )
    assert (process.returncode, process.stderr) == (0, "")
