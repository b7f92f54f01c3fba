"""Classes of a user who never heard of Rankzero: they note what they are given. Copied into the folder of a test."""

import json
import os
import random
import signal
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanAbsoluteError


class Rows(Dataset):
    def __init__(self, count: int, noise: float = 0.0, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.rand(count, 4, generator=generator)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int):
        inputs = self.inputs[index]
        if self.noise:  # with each of the generators that people use
            inputs = inputs + self.noise * (torch.rand(4) + random.random() + np.random.rand())
        return index, inputs, inputs.sum(0, keepdim=True)


class Data(LightningDataModule):
    def __init__(
        self, count: int = 640, held_out: int = 33, size: int = 16, noise: float = 0.0, workers: int = 0, seed: int = 0
    ):
        super().__init__()
        self.count, self.held_out, self.size, self.noise, self.workers = count, held_out, size, noise, workers
        self.seed = seed

    def train_dataloader(self):
        data = Rows(self.count, self.noise, self.seed)
        again = self.workers > 0
        return DataLoader(data, batch_size=self.size, shuffle=True, num_workers=self.workers, persistent_workers=again)

    def val_dataloader(self):
        return DataLoader(Rows(self.held_out), batch_size=self.size)


class Net(LightningModule):
    def __init__(self, dropout: float = 0.0, rate: float = 0.05) -> None:
        super().__init__()
        layers = torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(8, 1)
        self.layers, self.rate = torch.nn.Sequential(*layers), rate
        self.train_error, self.val_error = MeanAbsoluteError(), MeanAbsoluteError()

    def note(self, what: str, indices) -> None:
        line = json.dumps([what, self.trainer.current_epoch, self.trainer.global_step, indices.tolist()])
        with Path(f"noted-{self.global_rank}.jsonl").open("a") as file:
            file.write(line + "\n")

    def training_step(self, batch, batch_idx):
        indices, inputs, targets = batch
        self.note("train", indices)
        outputs = self.layers(inputs)
        loss = torch.nn.functional.mse_loss(outputs, targets)
        self.train_error(outputs, targets)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("synced", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("train_error", self.train_error, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        indices, inputs, targets = batch
        if not self.trainer.sanity_checking:
            self.note("val", indices)
        outputs = self.layers(inputs)
        self.val_error(outputs, targets)
        self.log("val_loss", torch.nn.functional.mse_loss(outputs, targets))
        self.log("val_error", self.val_error)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.rate, momentum=0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


class KillAt(Callback):
    """Ends one rank behind a step, as nothing but a power cut would."""

    def __init__(self, step: int, rank: int = 0) -> None:
        self.step, self.rank = step, rank

    def on_train_batch_end(self, trainer, *arguments) -> None:
        if trainer.global_step == self.step and trainer.global_rank == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)
