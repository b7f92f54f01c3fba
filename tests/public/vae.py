"""A variational autoencoder in the style of hydra templates: optimizer and network are hyperparameters."""

from collections.abc import Callable
from functools import partial

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split


class Encoder(nn.Module):
    def __init__(self, hidden: int = 16):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU())
        self.hidden = hidden

    def forward(self, x):
        return self.body(x)


class VAE(L.LightningModule):
    def __init__(
        self,
        net: nn.Module | None = None,
        optimizer: Callable = partial(torch.optim.AdamW, lr=3e-3, weight_decay=1e-2),
        scheduler: Callable = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=2),
        latent_dim: int = 4,
        kl_weight: float = 0.1,
    ):
        super().__init__()
        net = net or Encoder()
        self.save_hyperparameters()  # a module and partial functions
        self.net = net
        self.fc_mu, self.fc_var = nn.Linear(net.hidden, latent_dim), nn.Linear(net.hidden, latent_dim)
        self.decoder = nn.Sequential(nn.Linear(latent_dim, net.hidden), nn.ReLU(), nn.Linear(net.hidden, 64))
        self.example_input_array = torch.zeros(2, 1, 8, 8)

    def forward(self, x):
        return self.decoder(self.fc_mu(self.net(x))).view(-1, 1, 8, 8)

    def step(self, batch, stage):
        features = self.net(batch["image"])
        mu, log_var = self.fc_mu(features), self.fc_var(features)
        posterior = torch.distributions.Normal(mu, (0.5 * log_var).exp())
        z = posterior.rsample() if self.training else mu
        recon = F.mse_loss(self.decoder(z).view_as(batch["image"]), batch["image"])
        kl = torch.distributions.kl_divergence(posterior, torch.distributions.Normal(0.0, 1.0)).mean()
        loss = recon + self.hparams.kl_weight * kl
        self.log_dict({f"{stage}/{k}": v for k, v in {"recon": recon, "kl": kl, "loss": loss}.items()}, sync_dist=True)
        return loss

    def training_step(self, batch, batch_idx):
        loss = self.step(batch, "train")
        return {"loss": loss, "log": loss.detach()}

    def validation_step(self, batch, batch_idx):
        return self.step(batch, "val")

    def test_step(self, batch, batch_idx):
        return self.step(batch, "test")

    def predict_step(self, batch, batch_idx):
        return {"index": batch["index"], "image": self(batch["image"])}

    def configure_optimizers(self):
        optimizer = self.hparams.optimizer(params=self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": self.hparams.scheduler(optimizer=optimizer)}


class Blobs(Dataset):
    def __init__(self, count, noise):
        self.centers = torch.rand(count, 2, generator=torch.Generator().manual_seed(3)) * 8
        self.noise = noise

    def __len__(self):
        return len(self.centers)

    def __getitem__(self, index):
        grid = torch.stack(torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij"))
        image = (-(grid - self.centers[index][:, None, None]).square().sum(0) / 4).exp()[None]
        return {"index": index, "image": image + self.noise * torch.randn(1, 8, 8)}


class BlobData(L.LightningDataModule):
    def __init__(self, batch_size: int = 16, noise: float = 0.1, shuffle: bool = True):
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.data_train = self.data_val = None

    def prepare_data(self):
        self.prepared = True

    def setup(self, stage):
        if not self.data_train and not self.data_val:
            whole = Blobs(208, self.hparams.noise)
            self.data_train, self.data_val = random_split(whole, [160, 48], torch.Generator().manual_seed(42))

    def train_dataloader(self):
        return DataLoader(self.data_train, self.hparams.batch_size, shuffle=self.hparams.shuffle)

    def val_dataloader(self):
        return DataLoader(self.data_val, self.hparams.batch_size)

    test_dataloader = predict_dataloader = val_dataloader
