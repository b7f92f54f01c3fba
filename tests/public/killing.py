"""Ends a process in mid-epoch, as a power cut would."""

import os
import signal
import time
from pathlib import Path

import torch
from lightning.pytorch import Callback


class KillAt(Callback):
    """Kills one rank after a batch, once there is a checkpoint to resume from."""

    def __init__(self, batch: int, rank: int = 0, run: str = "x"):
        self.batch, self.rank, self.run, self.seen = batch, rank, run, 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen += 1
        if self.seen == self.batch and trainer.global_rank == self.rank:
            deadline = time.monotonic() + 20
            while not list(Path("runs").glob(f"{self.run}/checkpoints/step-*")) and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)


class SeedSteps(Callback):
    """Seeds torch before each batch, so that runs which draw other numbers in between draw the same in a step."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        torch.manual_seed(1000 * trainer.current_epoch + batch_idx)
