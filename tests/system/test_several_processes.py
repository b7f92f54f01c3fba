"""Two and more processes on this machine, on gloo: without a launcher, and under torchrun."""

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from running import BIN, evaluate, evaluate_here, fit, fit_here, script

TOY = ("--model", "MLP", "--data", "Toy", "--epochs", "2", "--global_batch_size", "32")
MINE = """
import os, signal, torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from torch.utils.data import DataLoader, TensorDataset

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    def training_step(self, batch, batch_idx):
        loss = (self.layer(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()
        self.log("loss", loss)
        return loss
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", (self.layer(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Data(LightningDataModule):
    def setup(self, stage):
        generator = torch.Generator().manual_seed(0)
        self.rows = TensorDataset(torch.rand(200, 4, generator=generator))
    def train_dataloader(self):
        return DataLoader(self.rows, batch_size=16, shuffle=True, num_workers=1)
    def val_dataloader(self):
        return DataLoader(TensorDataset(self.rows.tensors[0][:33]), batch_size=16)

class KillRankOneAt(Callback):
    def __init__(self, step: int):
        self.step = step
    def on_train_batch_end(self, trainer, *arguments):
        if trainer.global_step == self.step and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def left_in(folder: Path) -> list[psutil.Process]:
    """Processes that work in a folder."""
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.cwd() == str(folder):
                left.append(process)
    return left


def test_exact_metrics_at_any_number_of_processes(here):
    fit_here("--epochs", "2", "--run", "x")  # a ResNet: batch norm, and 180 samples that 7 does not divide
    evaluate_here("--batch_size", "7", "--output", "1")
    evaluate("--devices", "3", "--batch_size", "7", "--output", "3", folder=here)
    one, three = (json.loads((here / processes).read_text()) for processes in ("1", "3"))
    assert (one["world_size"], three["world_size"]) == (1, 3)
    assert three["metrics"] == pytest.approx(one["metrics"], abs=1e-6)


def test_a_users_own_classes_with_two_processes(mine):
    result = fit("--model", "mine.Net", "--data", "mine.Data", "--epochs", "2", "--devices", "2", folder=mine)
    summary = result.summary("Net-Data-1")
    assert (summary["status"], summary["samples"], summary["world_size"]) == ("finished", 400, 2)
    assert {"loss", "val_loss"} <= set(summary["metrics"])


def test_a_rank_that_is_killed_ends_the_others_and_the_next_start_carries_on(mine):
    arguments = ("--model", "mine.Net", "--data", "mine.Data", "--epochs", "3", "--devices", "2", "--run", "x")
    kill = ("--trainer.callbacks", "mine.KillRankOneAt", "--trainer.callbacks.step", "10")
    result = fit(*arguments, *kill, folder=mine, code=1)
    assert "rank 1 was ended by SIGKILL" in result.err
    assert not left_in(mine)
    result = fit(*arguments, folder=mine)
    assert "carrying on from step-00000007" in result.out
    assert (result.summary("x")["samples"], result.summary("x")["attempts"]) == (600, 2)


def test_a_wrong_request_is_told_once(tmp_path):
    result = fit("--batch_size", "1000", "--devices", "2", folder=tmp_path, code=2)
    assert result.err.count("cannot start") == 1 and "1000 on each of 2 processes, 2,000 in all" in result.err
    assert "Traceback" not in result.err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_person_ends_it(tmp_path, signum):
    command = [str(BIN / "python"), script("fit"), *TOY, "--epochs", "100000", "--devices", "2", "--run", "x"]
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=out, start_new_session=True)
        deadline = time.monotonic() + 60
        while "epoch 1/" not in (tmp_path / "out").read_text():
            assert time.monotonic() < deadline and process.poll() is None, (tmp_path / "out").read_text()
            time.sleep(0.1)
        if signum == signal.SIGINT:  # a terminal sends it to the whole group
            os.killpg(process.pid, signum)
        else:
            process.send_signal(signum)
        assert process.wait(30) != 0
    deadline = time.monotonic() + 10
    while left_in(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left_in(tmp_path)
    if signum != signal.SIGKILL:
        text = Path(tmp_path / "out").read_text()
        assert "the same command with --run x" in text and "Traceback" not in text
        assert json.loads((tmp_path / "runs/x/summary.json").read_text())["status"] == "stopped"
