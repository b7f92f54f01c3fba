import json

import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rankzero import Trainer
from stock import QUIET, Unsized


class ShuffledNet(BoringModel):
    """BoringModel that trains on 29 shuffled samples, or on the given loaders."""

    def __init__(self, *loaders, **settings):
        super().__init__()
        self.loaders = loaders or [self.loader(**settings)]

    @staticmethod
    def loader(count=29, **settings):
        return DataLoader(TensorDataset(torch.rand(count, 32)), **{"batch_size": 8, "shuffle": True, **settings})

    @staticmethod
    def stream():
        return DataLoader(Unsized(torch.rand(4, 32)), batch_size=2)

    def training_step(self, batch, batch_idx):
        while isinstance(batch, list):
            batch = batch[0]
        return self.step(batch)

    def train_dataloader(self):
        return list(self.loaders) if len(self.loaders) > 1 else self.loaders[0]


class DropoutNet(BoringModel):
    """BoringModel that logs its losses and draws random numbers in dropout."""

    stops_at = None

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(32, 2)
        self.dropout = nn.Dropout(0.2)

    def training_step(self, batch, batch_idx):
        torch.manual_seed(self.global_step)  # stock Lightning's loaders draw from the same generator
        loss = self.loss(self.dropout(self(batch[0])))
        if self.global_step == self.stops_at:
            self.trainer.session.coordinator.control_channel.request_stop("the test")
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(self(batch[0])))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(self(batch[0])))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])


def samples(count=21, shuffle=False):
    data = TensorDataset(torch.randn(count, 32, generator=torch.Generator().manual_seed(1)))
    return DataLoader(data, batch_size=4, shuffle=shuffle)


def train(model=None, kind=Trainer, **settings):
    """Trains the run `x` for two epochs; returns the Trainer and the model."""
    model, output = model or DropoutNet(), {"accelerator": "cpu"} if "quiet" in settings else QUIET
    name = {"name": "x"} if kind is Trainer else {}
    trainer = kind(**{"max_epochs": 2, **output, **name, **settings})
    trainer.fit(model, samples(), samples())
    return trainer, model


def summary_in(script_folder, run="x"):
    return json.loads((script_folder / "runs" / run / "summary.json").read_text())


def count_attempts(script_folder):
    return len(json.loads((script_folder / "runs/x/run.json").read_text())["attempts"])
