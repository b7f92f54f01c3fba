"""Runs the scripts in launch/ as a user does, and checks exit codes and terminal output."""

import json

from running import evaluate, evaluate_here, fit, fit_here


def test_the_default_run_learns_the_digits(here, capsys):
    result = fit(folder=here)
    summary = result.summary("ResNet-Digits-1")
    assert summary["status"] == "finished" and summary["metrics"]["val/accuracy"] >= 0.97
    assert "run ResNet-Digits-1: finished" in result.out and result.err == ""
    evaluate_here("--run", "ResNet-Digits-1", "--split", "test")
    metrics = json.loads((here / "runs/ResNet-Digits-1/evaluate-test.json").read_text())["metrics"]
    assert metrics["test/accuracy"] >= 0.95 and f"{metrics['test/accuracy']:.6f}" in capsys.readouterr().out


def test_a_wrong_request_exits_with_code_2_and_prints_no_traceback(tmp_path):
    result = fit("--batch_size", "5000", folder=tmp_path, code=2)
    assert result.err.startswith("rankzero: cannot start\n  asked  --batch_size 5000\n")
    assert "Traceback" not in result.out + result.err and not list(tmp_path.iterdir())
    result = evaluate("--run", "nothing", folder=tmp_path, code=2)
    assert "no such run" in result.err and "Traceback" not in result.err


def test_an_error_in_user_code_exits_with_code_1_and_shows_no_library_frames(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from lightning.pytorch.demos.boring_classes import BoringModel, BoringDataModule as Data\n"
        "class Net(BoringModel):\n    def training_step(self, batch, batch_idx):\n        raise KeyError('mine')\n"
    )
    result = fit("--model", "mine.Net", "--data", "mine.Data", folder=tmp_path, code=1)
    assert "raise KeyError('mine')" in result.err and "frames of libraries left out" in result.err
    assert "site-packages" not in result.err
    assert result.summary()["status"] == "failed"


def test_a_terminal_shows_a_progress_bar_and_a_pipe_shows_lines(tmp_path):
    arguments = ("--model", "MLP", "--data", "Toy", "--epochs", "2")
    lines = fit(*arguments, folder=tmp_path).out.splitlines()
    assert [line for line in lines if line.startswith("epoch 2/2 done")]
    from running import run, script

    line = " ".join(["python", script("fit"), *arguments])
    out = run("script", "--quiet", "--return", "--command", line, "/dev/null", folder=tmp_path).out
    assert "━" in out and "epoch 2/2" in out and "done" not in out


def test_print_config_and_model_help_print_once_and_exit_with_code_0(here):
    arguments = ("--print_config", "--devices", "2", "--model", "MLP", "--epochs", "1")
    config = fit(*arguments, folder=here).out
    assert config.count("class_path: lightning_modules.MLP") == 1
    (here / "c.yaml").write_text(config.replace("devices: 2", "devices: 1"))
    assert fit_here("--config", "c.yaml") == 0
    assert "--model.depth" in fit("--model.help", "ResNet", folder=here).out


def test_far_more_processes_than_cores_are_refused(tmp_path):
    assert "cores on this machine" in fit("--devices", "100000", folder=tmp_path, code=2).err
