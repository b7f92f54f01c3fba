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

from running import BIN, fit, script

MINE = """
import torch
from lightning.pytorch import LightningDataModule, LightningModule
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


def test_a_wrong_request_is_told_once(tmp_path):
    result = fit("--batch_size", "1000", "--devices", "2", folder=tmp_path, code=2)
    assert result.err.count("cannot start") == 1 and "1000 on each of 2 processes, 2,000 in all" in result.err
    assert "Traceback" not in result.err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_person_ends_it(mine, signum):
    """A terminal sends Ctrl-C to the whole group, loader processes and all, and so do schedulers with other signals."""
    arguments = ("--model", "mine.Net", "--data", "mine.Data", "--epochs", "100000", "--devices", "2", "--run", "x")
    with (mine / "out").open("w") as out:
        command = [str(BIN / "python"), script("fit"), *arguments]
        process = subprocess.Popen(command, cwd=mine, stdout=out, stderr=out, start_new_session=True)
        deadline = time.monotonic() + 60
        while "epoch 1/" not in (mine / "out").read_text():
            assert time.monotonic() < deadline and process.poll() is None, (mine / "out").read_text()
            time.sleep(0.1)
        if signum == signal.SIGKILL:
            process.send_signal(signum)
        else:
            os.killpg(process.pid, signum)
        code = process.wait(30)
    deadline = time.monotonic() + 10
    while left_in(mine) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left_in(mine)
    if signum != signal.SIGKILL:
        text = (mine / "out").read_text()
        assert code == 75 and "the same command with --name x" in text and "Traceback" not in text
        assert text.count(f"rankzero: {signum.name}: stopping") == 1
        assert json.loads((mine / "runs/x/summary.json").read_text())["status"] == "stopped"
