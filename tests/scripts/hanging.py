"""A training script of a user in which one rank comes to a standstill, in a way that the arguments choose."""

import argparse
import ctypes
import os
import signal
import time

import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, Dataset

from rankzero import Trainer

parser = argparse.ArgumentParser()
parser.add_argument("--hang", default="none", help="the kind of standstill, see below")
parser.add_argument("--rank", type=int, default=1, help="the rank that comes to a standstill")
parser.add_argument("--step", type=int, default=20, help="number of completed steps before the standstill")
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--devices", type=int)
parser.add_argument("--nodes", type=int)
parser.add_argument("--seconds", type=float, default=0.01, help="duration of a step")
parser.add_argument("--hang_timeout", default="5")
parser.add_argument("--hang_action", default="stop")
parser.add_argument("--epochs", type=int, default=100)
options = parser.parse_args()

RANK = int(
    next((os.environ[name] for name in ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID") if name in os.environ), 0)
)
IS_CHOSEN = options.rank == RANK


class Numbers(Dataset):
    """Random numbers; one read sleeps forever or kills its process."""

    first_read = 0.0

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> torch.Tensor:
        if IS_CHOSEN and options.hang in ("data", "worker dies") and self.has_begun:
            if options.hang == "data":
                time.sleep(1e6)
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((8,), index / 4000)

    @property
    def has_begun(self) -> bool:
        """Whether this process has read its first number a second ago: the first step is then complete."""
        self.first_read = self.first_read or time.monotonic()
        return time.monotonic() > self.first_read + 1


class Model(LightningModule):
    """A linear layer; one step on one rank never ends."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        is_slow = IS_CHOSEN and options.hang == "slow"
        time.sleep(options.seconds * (1 + 2 * is_slow))
        if self.global_step >= options.step:
            self.stand_still()
        mean = self.layer(batch).mean()
        self.log("mean", mean, on_step=False, on_epoch=True, sync_dist=True)
        return mean

    def stand_still(self) -> None:
        """Comes to a standstill on the chosen rank."""
        if options.hang == "different collectives":
            if IS_CHOSEN:
                torch.distributed.barrier()
            else:
                torch.distributed.all_reduce(torch.zeros(3))
        if not IS_CHOSEN:
            return
        if options.hang == "loop":
            while True:
                pass
        elif options.hang == "all_reduce in the last step" and self.trainer.is_last_batch:
            torch.distributed.all_reduce(torch.zeros(9))
        elif options.hang == "blocked interpreter":
            ctypes.PyDLL(None).sleep(100_000)
        elif options.hang == "SIGSTOP":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif options.hang == "pause" and self.global_step == options.step:
            time.sleep(12)


trainer = Trainer(
    name="hanging",
    devices=options.devices or "auto",
    accelerator="cpu",
    max_epochs=options.epochs,
    hang_timeout=options.hang_timeout,
    hang_action=options.hang_action,
    enable_progress_bar=False,
)
loader = DataLoader(Numbers(), batch_size=8, num_workers=options.workers)
trainer.fit(Model(), loader)
