"""Two or more processes on this machine, with gloo: started by --devices, or with RANK and WORLD_SIZE."""

import fcntl
import json
import os
import pty
import re
import signal
import socket
import subprocess
import termios

import pytest

from running import INTERPRETER_BIN, LIMIT, fit, processes_in, script, wait_until
from system.forks import fit_on_ranks, summary

UNEQUAL_MODULE = """
import os
from recording import Data

class Unequal(Data):
    def __init__(self, part: str):
        super().__init__()
        self.part = part
    def setup(self, stage):
        rank = int(os.environ["RANK"])
        self.count, self.held_out = 200 - rank * (self.part == "train"), 33 - rank * (self.part == "val")
"""

NET = ("--model", "recording.Net", "--devices", "2")
TRAIN = (*NET, "--data", "recording.Data", "--data.count", "200", "--data.workers", "1")
LONG_RUN = (str(INTERPRETER_BIN / "python"), script("fit"), *TRAIN, "--epochs", "100000", "--run", "x")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_remains_after_a_signal_to_the_run(user_folder, signum):
    """Terminals send Ctrl-C, and schedulers other signals, to the whole process group, including loader workers."""
    printed = (user_folder / "out").read_text
    with (user_folder / "out").open("w") as out:
        process = subprocess.Popen(LONG_RUN, cwd=user_folder, stdout=out, stderr=out, start_new_session=True)
        wait_until(lambda: "epoch 1/" in printed() or process.poll() is not None, "training")
        assert process.poll() is None, printed()
        if signum == signal.SIGKILL:
            process.kill()
        else:
            os.killpg(process.pid, signum)
        code = process.wait(LIMIT)
    wait_until(lambda: not processes_in(user_folder), "the end of all processes")
    if signum != signal.SIGKILL:
        assert code == 75 and "the same command with --name x" in printed() and "Traceback" not in printed()
        assert printed().count(f"rankzero: {signum.name}: stopping") == 1
        assert summary(user_folder, "x")["status"] == "stopped"


def test_a_closed_terminal_stops_the_run_with_its_checkpoint_saved(user_folder):
    terminal, end_of_run = pty.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), end_of_run)

    def begin_session():
        fcntl.ioctl(end_of_run, termios.TIOCSCTTY, 0)  # becomes the controlling terminal
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also if the tests run under nohup

    process = subprocess.Popen(LONG_RUN, cwd=user_folder, start_new_session=True, preexec_fn=begin_session, **streams)
    os.close(end_of_run)
    printed = b""
    while b"epoch 1/" not in printed:
        printed += os.read(terminal, 4096)
    os.close(terminal)
    try:
        assert process.wait(LIMIT) == 75
    finally:
        process.kill()
    wait_until(lambda: not processes_in(user_folder), "the end of all processes")
    stopped = summary(user_folder, "x")
    assert (stopped["status"], stopped["reason"]) == ("stopped", "SIGHUP") and stopped["checkpoint"]
    assert (user_folder / "runs/x/report.html").exists()


@pytest.mark.parametrize(("part", "counts"), [("train", (200, 199)), ("val", (33, 32))])
def test_unequal_data_on_the_ranks_is_refused(user_folder, part, counts):
    (user_folder / "mine.py").write_text(UNEQUAL_MODULE)
    result = fit(*NET, "--data", "mine.Unequal", "--data.part", part, folder=user_folder, code=2)
    host = socket.gethostname()
    assert "found  the data differs between ranks" in result.err and result.err.count("cannot start") == 1
    assert f"samples: {counts[0]} on rank 0 ({host}); {counts[1]} on rank 1 ({host})" in result.err
    assert not list((user_folder / "runs").glob("*"))


def test_learning_rate_trials_are_not_counted_on_two_processes(user_folder):
    finder = ("--trainer.callbacks+=LearningRateFinder", "--trainer.callbacks.num_training_steps=20")
    finder += ("--trainer.callbacks.attr_name=rate",)
    result = fit(*TRAIN, "--epochs", "3", *finder, folder=user_folder)
    written = result.summary()
    assert (written["samples"], written["steps"], written["world_size"]) == (600, 21, 2)
    assert written["ledger"] == [f"epoch {number}: 200 of 200 samples, each once" for number in (1, 2, 3)]
    assert result.err.count("Learning rate set to") == 1
    assert result.out.count("epoch 1/3 done") == 1


REFUSE_CALLBACK = """
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException

class Refuse(Callback):
    def __init__(self, rank: int):
        self.rank = rank
    def on_fit_start(self, trainer, pl_module):
        if trainer.global_rank == self.rank:
            raise MisconfigurationException("not on this rank")
        torch.distributed.barrier()
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_waits_for_one_that_refuses_is_refused_too(user_folder, rank):
    (user_folder / "mine.py").write_text(REFUSE_CALLBACK)
    callback = ("--trainer.callbacks+=mine.Refuse", f"--trainer.callbacks.rank={rank}")
    result = fit(*TRAIN, *callback, folder=user_folder, code=2)
    assert result.err.count("cannot start\n  not on this rank") == 1 and "failed" not in result.out
    assert "Traceback" not in result.err and not list((user_folder / "runs").glob("*"))


SPLIT_MODULE = """
import numpy
from lightning.pytorch import LightningDataModule
from recording import Rows
from torch.utils.data import DataLoader, random_split

class Split(LightningDataModule):
    def __init__(self):
        super().__init__()
        numpy.random.randn()
    def setup(self, stage):
        rows = Rows(40)
        rows.inputs += numpy.random.randn()  # NumPy keeps every second one for the next call
        self.rows, self.held_out = random_split(rows, [32, 8])  # by the generator that the whole process shares
    def train_dataloader(self):
        return DataLoader(self.rows, batch_size=8, shuffle=True)
    def val_dataloader(self):
        return DataLoader(self.held_out, batch_size=8)
"""


def test_a_random_split_in_setup_is_the_same_at_another_world_size(user_folder):
    (user_folder / "split.py").write_text(SPLIT_MODULE)
    arguments = ("--model", "recording.Net", "--data", "split.Split", "--run", "x", "--global_batch_size", "8")
    for epochs, world in enumerate((2, 1, 3), 1):
        fit_on_ranks(*arguments, "--epochs", str(epochs), folder=user_folder, world=world)
        assert summary(user_folder, "x")["ledger"][-1].endswith("32 of 32 samples, each once")
    losses = []
    for world in (1, 2, 3):
        fit_on_ranks("--run", "x", "--batch_size", "3", folder=user_folder, world=world, script="evaluate")
        found = json.loads((user_folder / "runs/x/evaluate-val.json").read_text())
        assert found["world_size"] == world
        losses.append(found["metrics"]["val_loss"])
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


def test_a_quiet_run_on_two_processes_prints_one_line(tmp_path):
    result = fit("--devices", "2", "--model", "MLP", "--name", "x", "--epochs", "2", "--quiet", folder=tmp_path)
    assert re.fullmatch(r"run x: finished, .*val/accuracy \S+, .*runs/x\n", result.out) and result.err == ""
