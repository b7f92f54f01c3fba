"""The autoencoder of the first tutorial, with callbacks that are added and removed during training."""

import os

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class FirstBatches(Callback):
    """Removes itself after the third batch, and adds a `CountBatches` callback in its place."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 2 and trainer.current_epoch == 0:
            trainer.callbacks.remove(self)
            trainer.callbacks.append(CountBatches())


class CountBatches(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        pl_module.counted += 1


class GradientNorms(Callback):
    """Logs through a stored reference to `pl_module.log`."""

    def on_train_start(self, trainer, pl_module):
        log = pl_module.log
        weight = pl_module.encoder[0].weight
        weight.register_hook(lambda gradient: log("gradient_norm", gradient.norm(), on_step=True))


class LitAutoEncoder(pl.LightningModule):
    def __init__(self, encoder: nn.Module = None, latent: int = 3):
        super().__init__()
        self.save_hyperparameters(ignore=["encoder"])
        self.encoder = encoder or nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 16), nn.ReLU(), nn.Linear(16, 64))
        self.counted = 0

    def on_fit_start(self):
        pl.seed_everything(42 + int(os.environ.get("LOCAL_RANK", 0)))

    def on_train_epoch_start(self):
        loader = self.trainer.train_dataloader
        assert isinstance(loader, DataLoader)
        self.log("size_of_data", float(len(loader.dataset)))
        self.log("size_of_batch", float(loader.batch_size))

    def training_step(self, batch, batch_idx):
        x, _ = batch
        x = x.view(x.size(0), -1)
        x_hat = self.decoder(self.encoder(x))
        loss = nn.functional.mse_loss(x_hat, x)
        self.log("train_loss", loss)
        return loss

    def on_train_epoch_end(self):
        self.log("counted", float(self.counted))

    def validation_step(self, batch, batch_idx):
        x, _ = batch
        self.log("val_loss", nn.functional.mse_loss(self.decoder(self.encoder(x)), x))

    def test_step(self, batch, batch_idx):
        x, _ = batch
        self.log("test_loss", nn.functional.mse_loss(self.decoder(self.encoder(x)), x))

    def predict_step(self, batch, batch_idx):
        return self.encoder(batch[0])

    def configure_callbacks(self):
        return [FirstBatches(), GradientNorms()]

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class DigitsDataModule(pl.LightningDataModule):
    def __init__(self, batch_size: int = 20, shuffle: bool = True):
        super().__init__()
        self.batch_size, self.shuffle = batch_size, shuffle

    def setup(self, stage: str):
        images = torch.tensor(load_digits().images, dtype=torch.float32).flatten(1) / 16
        data = TensorDataset(images[:240], torch.tensor(load_digits().target[:240]))
        self.train, self.val = random_split(data, [200, 40], generator=torch.Generator().manual_seed(1))

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=self.shuffle)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.batch_size)

    test_dataloader = predict_dataloader = val_dataloader
