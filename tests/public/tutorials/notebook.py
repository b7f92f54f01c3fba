"""Cells of a notebook: the second is interrupted with the stop button, then a cell trains again."""

import os
import signal
import sys

import lightning as L
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, TensorDataset

BATCH = 8
sys.ps1 = "In [1]: "  # as in an interactive interpreter


class Net(L.LightningModule):
    interrupts_at = None

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        if self.global_step == self.interrupts_at:
            os.kill(os.getpid(), signal.SIGINT)
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run_cell(model, epochs):
    trainer = Trainer(max_epochs=epochs, accelerator="cpu", enable_progress_bar=False)
    try:
        trainer.fit(model, DataLoader(data, BATCH))
    except (KeyboardInterrupt, SystemExit):  # the kernel prints these and goes on
        print("interrupted")
    return trainer


data = TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(4)))
first = run_cell(Net(), 1)
interrupted = Net()
interrupted.interrupts_at = 3
run_cell(interrupted, 50)
again = Net()
last = run_cell(again, 2)
torch.save({"weights": again.state_dict(), "steps": [first.global_step, last.global_step]}, "result.pt")
