"""A Siamese network (SimCLR): two views per sample, a moving average of the weights, and replaced methods."""

import copy

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, Dataset


class EMA(Callback):
    """Keeps a moving average of the weights, and validates the model with it."""

    def __init__(self, decay: float = 0.9):
        self.decay, self.average, self.kept = decay, None, None

    def on_fit_start(self, trainer, pl_module):
        if self.average is None:
            self.average = copy.deepcopy(pl_module.state_dict())

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for name, value in pl_module.state_dict().items():
            self.average[name].lerp_(value, 1 - self.decay) if value.is_floating_point() else None

    def on_validation_start(self, trainer, pl_module):
        if self.average is not None:
            self.kept = copy.deepcopy(pl_module.state_dict())
            pl_module.load_state_dict(self.average)

    def on_validation_end(self, trainer, pl_module):
        if self.kept is not None:
            pl_module.load_state_dict(self.kept)

    def state_dict(self):
        return {"average": self.average, "decay": self.decay}

    def load_state_dict(self, state_dict):
        self.average = state_dict["average"]


class Views(Dataset):
    """Data set of two noisy views per sample."""

    def __init__(self, count, seed, noise=0.2):
        self.points = torch.randn(count, 10, generator=torch.Generator().manual_seed(seed))
        self.noise = noise

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        point = self.points[index]
        views = [point + self.noise * torch.randn(10) for _ in range(2)]
        return views, index


class ViewData(L.LightningDataModule):
    def __init__(self, batch_size: int = 16, noise: float = 0.2, shuffle: bool = True):
        super().__init__()
        self.batch_size, self.noise, self.shuffle = batch_size, noise, shuffle

    def train_dataloader(self):
        return DataLoader(Views(128, 0, self.noise), self.batch_size, shuffle=self.shuffle, drop_last=True)

    def val_dataloader(self):
        return DataLoader(Views(32, 1, self.noise), self.batch_size)

    test_dataloader = predict_dataloader = val_dataloader


class SimCLR(L.LightningModule):
    def __init__(self, temperature: float = 0.2, lr: float = 1e-2, warmup: int = 4):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(10, 16), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
        self.steps_seen = 0

    def info_nce(self, batch):
        views, _ = batch
        features = F.normalize(self.head(self.encoder(torch.cat(views))), dim=-1)
        similarity = features @ features.T / self.hparams.temperature
        itself = torch.eye(len(similarity), dtype=torch.bool, device=self.device)
        similarity = similarity.masked_fill(itself, -9e15)
        targets = torch.arange(len(similarity), device=self.device).roll(len(similarity) // 2)
        return F.cross_entropy(similarity, targets)

    def training_step(self, batch, batch_idx):
        loss = self.info_nce(batch)
        self.log("train/loss", loss, prog_bar=True)
        if self.trainer.global_step >= self.hparams.warmup:
            self.training_step = self.later_training_step
        return loss

    def later_training_step(self, batch, batch_idx):
        loss = self.info_nce(batch) * 0.5
        self.log("train/loss", loss, prog_bar=True)
        self.log("train/later", float(batch_idx))
        return loss

    def on_train_start(self):
        """Counts optimizer steps in a wrapper around `step`, as schedulers do."""
        optimizer = self.optimizers(use_pl_optimizer=False)
        step = optimizer.step

        def counted(*args, **kwargs):
            self.steps_seen += 1
            return step(*args, **kwargs)

        optimizer.step = counted

    def on_train_epoch_end(self):
        self.log("steps_seen", float(self.steps_seen))

    def on_save_checkpoint(self, checkpoint):
        checkpoint["steps_seen"] = self.steps_seen

    def on_load_checkpoint(self, checkpoint):
        self.steps_seen = checkpoint["steps_seen"]

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.info_nce(batch), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test/loss", self.info_nce(batch))

    def predict_step(self, batch, batch_idx):
        return self.encoder(batch[0][0])

    def configure_callbacks(self):
        return [EMA()]

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=1e-4)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.trainer.max_epochs, eta_min=1e-4)
        return [optimizer], [scheduler]
