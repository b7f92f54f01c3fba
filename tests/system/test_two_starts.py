"""A second start of a run that is training is refused and changes nothing."""

import signal
import subprocess

import pytest
from boring_models import count_attempts

from rankzero.checkpoints.manifest import checkpoints_in
from running import INTERPRETER_BIN, LIMIT, fit, script, wait_until
from system.forks import summary

TRAIN = ("--model", "MLP", "--data", "Toy", "--run", "x", "--save_every", "50steps")


@pytest.fixture
def first_process(tmp_path):
    """Starts a run that trains until a test stops it, and waits for its first checkpoint."""
    command = [str(INTERPRETER_BIN / "python"), script("fit"), *TRAIN, "--epochs", "100000"]
    with (tmp_path / "first.log").open("w") as out:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=out)
    wait_until(lambda: checkpoints_in(tmp_path / "runs/x/checkpoints"), "a checkpoint")
    yield process
    process.kill()
    process.wait()


def test_a_second_start_is_refused_and_the_first_run_continues_even_if_it_was_suspended(tmp_path, first_process):
    saving = tmp_path / "runs/x/checkpoints/.step-99999999.saving"  # the folder of a save in progress
    saving.mkdir()
    for arguments in ((), ("--resume", "never")):
        second = fit(*TRAIN, "--epochs", "2", *arguments, folder=tmp_path, code=2)
        assert "asked  to train run x" in second.err and "Traceback" not in second.err
        assert f"process {first_process.pid} on" in second.err and f"kill {first_process.pid}" in second.err
        assert "--name ANOTHER-NAME" in second.err
        first_process.send_signal(signal.SIGSTOP)
    assert saving.is_dir() and count_attempts(tmp_path) == 1
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [".x.lock", "x"]
    first_process.send_signal(signal.SIGCONT)
    first_process.send_signal(signal.SIGTERM)
    assert first_process.wait(LIMIT) == 75, (tmp_path / "first.log").read_text()
    assert not (tmp_path / "runs/.x.lock").exists()
    assert summary(tmp_path, "x")["status"] == "stopped"
