"""Callbacks for tests: one kills a process in the middle of an epoch, as a power cut would; one seeds each step."""

import os
import signal
import time
from pathlib import Path

import torch
from lightning.pytorch import Callback


class KillAt(Callback):
    """Kills one rank after a batch, as soon as a checkpoint to resume from exists."""

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
    """Seeds torch before each batch: a step draws the same numbers, whatever the run draws between steps."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        torch.manual_seed(1000 * trainer.current_epoch + batch_idx)
