"""A stream: an iterable data set that divides itself among workers and processes; manual optimization."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Simulation(IterableDataset):
    """Random samples without a known length; each worker of each process yields different samples."""

    def __init__(self, length, seed):
        self.length, self.seed = length, seed

    def __iter__(self):
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        rank = torch.distributed.get_rank() if distributed else 0
        world = torch.distributed.get_world_size() if distributed else 1
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for index in range(rank * workers + worker, self.length, world * workers):
            generator = torch.Generator().manual_seed(self.seed * 10_000 + index)
            x = torch.randn(5, generator=generator)
            yield x, x.sum().sin()[None]


class StreamData(L.LightningDataModule):
    def __init__(self, batch_size: int = 8, num_workers: int = 0, length: int = 160):
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self):
        data = Simulation(self.hparams.length, 0)
        return DataLoader(data, batch_size=self.hparams.batch_size, num_workers=self.hparams.num_workers)

    def val_dataloader(self):
        return DataLoader(Simulation(32, 1), batch_size=self.hparams.batch_size)

    test_dataloader = predict_dataloader = val_dataloader


class OnlineRegressor(L.LightningModule):
    def __init__(self, lr: float = 0.05, accumulate: int = 2):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))

    def loss(self, batch):
        x, y = batch
        return nn.functional.smooth_l1_loss(self.net(x), y)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.manual_backward(loss / self.hparams.accumulate)
        if (batch_idx + 1) % self.hparams.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
        self.log("train_loss", loss, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
