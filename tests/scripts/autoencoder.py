"""The autoencoder of Lightning's first page, on handwritten digits; the only changed line imports the Trainer."""

import lightning as L
import torch
from options import finish, options
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from rankzero import Trainer


class LitAutoEncoder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 64))

    def training_step(self, batch, batch_idx):
        loss = self._loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self._loss(batch), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self._loss(batch), sync_dist=True)

    def _loss(self, batch):
        (x,) = batch
        x = x.view(x.size(0), -1)
        return nn.functional.mse_loss(self.decoder(self.encoder(x)), x)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main():
    L.seed_everything(7)
    images = torch.tensor(load_digits().images[:300] / 16, dtype=torch.float32)
    train, val = random_split(TensorDataset(images), [250, 50])
    autoencoder = LitAutoEncoder()
    trainer = Trainer(max_epochs=2, **options())
    trainer.fit(autoencoder, DataLoader(train, batch_size=16, shuffle=True), DataLoader(val, batch_size=16))
    finish(trainer, autoencoder, DataLoader(val, batch_size=16))


if __name__ == "__main__":
    main()
