"""Tabular regression in one class that defines its loaders, without a data module, and collects outputs in lists."""

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanAbsoluteError, R2Score


class Regression(pl.LightningModule):
    def __init__(self, hidden: int = 16, lr: float = 0.05, batch_size: int = 32, shuffle: bool = True):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(10, hidden), nn.BatchNorm1d(hidden), nn.GELU(), nn.Linear(hidden, 1))
        self.criterion = nn.HuberLoss()
        self.mae, self.r2 = MeanAbsoluteError(), R2Score()
        self.training_step_outputs, self.validation_step_outputs = [], []

    def prepare_data(self):
        load_diabetes()

    def setup(self, stage):
        features, target = load_diabetes(return_X_y=True)
        features = torch.tensor(features, dtype=torch.float32) * 20
        target = (torch.tensor(target, dtype=torch.float32)[:, None] - 152) / 77
        data = TensorDataset(features, target)
        self.train_set = torch.utils.data.Subset(data, range(330))
        self.val_set = torch.utils.data.Subset(data, range(330, len(data)))

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.hparams.batch_size, shuffle=self.hparams.shuffle)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.hparams.batch_size)

    def test_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.hparams.batch_size)

    def predict_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.hparams.batch_size)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.criterion(self(x), y)
        self.training_step_outputs.append(loss.detach())
        self.log("train/huber", loss)
        return loss

    def on_train_epoch_end(self):
        outputs = torch.stack(self.training_step_outputs)
        self.log("train/mean_of_batches", outputs.mean())
        self.log("train/batches", float(len(outputs)))
        self.training_step_outputs.clear()

    def on_save_checkpoint(self, checkpoint):
        checkpoint["training_step_outputs"] = list(self.training_step_outputs)

    def on_load_checkpoint(self, checkpoint):
        self.training_step_outputs = list(checkpoint["training_step_outputs"])

    def validation_step(self, batch, batch_idx):
        x, y = batch
        y_hat = self(x)
        self.mae(y_hat, y)
        self.r2(y_hat.squeeze(1), y.squeeze(1))
        self.log("val/mae", self.mae, on_step=False, on_epoch=True)
        self.log("val/r2", self.r2, on_step=False, on_epoch=True)
        self.validation_step_outputs.append({"loss": self.criterion(y_hat, y), "n": len(x)})

    def on_validation_epoch_end(self):
        outputs = self.validation_step_outputs
        total = sum(output["loss"] * output["n"] for output in outputs)
        self.log("val_loss", total / max(1, sum(output["n"] for output in outputs)), sync_dist=True)
        self.validation_step_outputs.clear()

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test/huber", self.criterion(self(x), y))

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self(batch[0]).squeeze(-1)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1, 2], gamma=0.3),
        }

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer.step(closure=optimizer_closure)
        if self.trainer.global_step < 6:
            for group in optimizer.param_groups:
                group["lr"] = self.hparams.lr * (self.trainer.global_step + 1) / 6
