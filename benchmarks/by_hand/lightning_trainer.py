"""The tutorial's model with stock Lightning: with its defaults, or with all optional features off.

python benchmarks/by_hand/lightning_trainer.py --epochs 3 --off
"""

import argparse
import json
import tempfile
import time

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import DataLoader, TensorDataset


class Module(LightningModule):
    """The tutorial's model as an ordinary LightningModule."""

    def __init__(self, log):
        super().__init__()
        self.layer, self.logs = torch.nn.Linear(20, 1), log

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.layer(inputs), targets)
        if self.logs:
            self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Clock(Callback):
    """Callback that measures the mean seconds per step after the first epoch."""

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            self.started, self.steps = time.perf_counter(), trainer.global_step

    def on_train_end(self, trainer, pl_module):
        self.seconds = (time.perf_counter() - self.started) / (trainer.global_step - self.steps)


def main():
    """Trains, and prints the seconds per step as JSON on the last line."""
    flags = argparse.ArgumentParser()
    flags.add_argument("--count", type=int, default=2048)
    flags.add_argument("--batch_size", type=int, default=32)
    flags.add_argument("--epochs", type=int, default=2)
    flags.add_argument("--off", action="store_true", help="no log, no logger, no checkpoints, no progress")
    arguments = flags.parse_args()
    data = TensorDataset(torch.rand(arguments.count, 20), torch.rand(arguments.count, 1))
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        disabled = dict.fromkeys(
            ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
        )
        settings = disabled if arguments.off else {"logger": TensorBoardLogger(folder)}
        trainer = Trainer(
            accelerator="cpu", max_epochs=arguments.epochs, default_root_dir=folder, callbacks=[clock], **settings
        )
        trainer.fit(Module(log=not arguments.off), DataLoader(data, batch_size=arguments.batch_size, shuffle=True))
    print()
    print(json.dumps(clock.seconds))


if __name__ == "__main__":
    main()
