"""A GAN in the style of the tutorials: `pytorch_lightning`, and manual optimization with two optimizers."""

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Generator(nn.Module):
    def __init__(self, latent_dim, width):
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(latent_dim, 32), nn.BatchNorm1d(32), nn.LeakyReLU(0.2), nn.Linear(32, width), nn.Tanh()
        )

    def forward(self, z):
        return self.model(z)


class Discriminator(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(width, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, points):
        return self.model(points)


class GAN(pl.LightningModule):
    def __init__(self, width: int = 6, latent_dim: int = 8, lr: float = 2e-3, b1: float = 0.5, b2: float = 0.999):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = Generator(latent_dim, width)
        self.discriminator = Discriminator(width)
        self.register_buffer("validation_z", torch.randn(4, latent_dim))
        self.generator_losses = []

    def forward(self, z):
        return self.generator(z)

    def adversarial_loss(self, y_hat, y):
        return F.binary_cross_entropy_with_logits(y_hat, y)

    def training_step(self, batch, batch_idx):
        (points,) = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(points.shape[0], self.hparams.latent_dim).type_as(points)

        self.toggle_optimizer(optimizer_g)
        g_loss = self.adversarial_loss(self.discriminator(self(z)), torch.ones(points.size(0), 1).type_as(points))
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        self.clip_gradients(optimizer_g, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)
        self.generator_losses.append(g_loss.detach())

        self.toggle_optimizer(optimizer_d)
        real_loss = self.adversarial_loss(self.discriminator(points), torch.ones(points.size(0), 1).type_as(points))
        fake_loss = self.adversarial_loss(
            self.discriminator(self(z).detach()), torch.zeros(points.size(0), 1).type_as(points)
        )
        d_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

        if (batch_idx + 1) % 2 == 0:
            self.lr_schedulers().step()

    def on_train_epoch_end(self):
        self.log("g_loss_of_rank", torch.stack(self.generator_losses).mean(), sync_dist=True)
        self.generator_losses.clear()

    def validation_step(self, batch, batch_idx):
        (points,) = batch
        self.log("val_realness", self.discriminator(points).sigmoid().mean())

    def test_step(self, batch, batch_idx):
        (points,) = batch
        self.log("test_realness", self.discriminator(points).sigmoid().mean())

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        (points,) = batch
        return self.discriminator(points).sigmoid()

    def configure_optimizers(self):
        lr, betas = self.hparams.lr, (self.hparams.b1, self.hparams.b2)
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=lr, betas=betas)
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=lr, betas=betas)
        return [opt_g, opt_d], [torch.optim.lr_scheduler.ExponentialLR(opt_g, 0.95)]


class RingDataModule(pl.LightningDataModule):
    def __init__(self, batch_size: int = 16, shuffle: bool = True):
        super().__init__()
        self.save_hyperparameters()
        self.dims = (6,)

    def setup(self, stage=None):
        angles = torch.linspace(0, 50, 200)[:, None] * torch.tensor([1.0, 2.0, 3.0])
        points = torch.cat([angles.sin(), angles.cos()], dim=1)
        self.train, self.val = TensorDataset(points[:160]), TensorDataset(points[160:])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.hparams.batch_size, shuffle=self.hparams.shuffle)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.hparams.batch_size)

    test_dataloader = predict_dataloader = val_dataloader
