"""Lightning's GAN example: manual optimization with two optimizers."""

import lightning as L
import torch
import torch.nn.functional as F
from options import finish, options
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rankzero import Trainer


class GAN(L.LightningModule):
    def __init__(self, latent_dim=8, width=6, lr=2e-4, b1=0.5, b2=0.999):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(latent_dim, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, width))
        self.discriminator = nn.Sequential(nn.Linear(width, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1), nn.Sigmoid())

    def forward(self, z):
        return self.generator(z)

    def adversarial_loss(self, y_hat, y):
        return F.binary_cross_entropy(y_hat, y)

    def training_step(self, batch):
        (points,) = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(points.shape[0], self.hparams.latent_dim).type_as(points)
        ones, zeros = torch.ones(len(points), 1).type_as(points), torch.zeros(len(points), 1).type_as(points)

        self.toggle_optimizer(optimizer_g)
        g_loss = self.adversarial_loss(self.discriminator(self(z)), ones)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        real_loss = self.adversarial_loss(self.discriminator(points), ones)
        fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), zeros)
        d_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def test_step(self, batch, batch_idx):
        self.log("realness", self.discriminator(batch[0]).mean())

    def configure_optimizers(self):
        settings = {"lr": self.hparams.lr, "betas": (self.hparams.b1, self.hparams.b2)}
        opt_g = torch.optim.Adam(self.generator.parameters(), **settings)
        return [opt_g, torch.optim.Adam(self.discriminator.parameters(), **settings)], []


def main():
    angles = torch.linspace(0, 50, 160)[:, None] * torch.tensor([1.0, 2.0, 3.0])
    points = TensorDataset(torch.cat([angles.sin(), angles.cos()], dim=1))
    trainer = Trainer(max_epochs=2, seed=3, strategy="ddp_find_unused_parameters_true", **options())
    model = GAN()
    trainer.fit(model, DataLoader(points, batch_size=16, shuffle=True))
    finish(trainer, model, DataLoader(points, batch_size=16))


if __name__ == "__main__":
    main()
