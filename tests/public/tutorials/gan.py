"""A GAN with manual optimization, toggled optimizers, and a figure of samples at each epoch's end."""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 8


class GAN(L.LightningModule):
    def __init__(self, latent_dim: int = 4, lr: float = 2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(latent_dim, 8), nn.LeakyReLU(0.2), nn.Linear(8, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1), nn.Sigmoid())
        self.noise = torch.Generator().manual_seed(0)
        self.validation_z = torch.ones(6, latent_dim)
        self.example_input_array = torch.zeros(2, latent_dim)
        self.shown = []

    def forward(self, z):
        return self.generator(z)

    def training_step(self, batch):
        (points,) = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(len(points), self.hparams.latent_dim, generator=self.noise).type_as(points)
        for optimizer, fake, valid in ((optimizer_g, True, 1.0), (optimizer_d, False, 0.9)):
            self.toggle_optimizer(optimizer)
            judged = self.discriminator(self(z) if fake else points)
            loss = F.binary_cross_entropy(judged, torch.full_like(judged, valid))
            if not fake:
                rejected = self.discriminator(self(z).detach())
                loss = (loss + F.binary_cross_entropy(rejected, torch.zeros_like(rejected))) / 2
            self.log("g_loss" if fake else "d_loss", loss, prog_bar=True)
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        networks = (self.generator, self.discriminator)
        return [torch.optim.Adam(network.parameters(), self.hparams.lr, (0.5, 0.999)) for network in networks], []

    def on_train_epoch_end(self):
        sample = self(self.validation_z.type_as(self.generator[0].weight)).detach()
        self.logger.experiment.add_histogram("points", sample, self.current_epoch)
        self.shown.append(sample)


if __name__ == "__main__":
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 2).sign() + 0.1 * torch.randn(64, 2))
    model = GAN()
    trainer = Trainer(
        accelerator="cpu", max_epochs=3, strategy="ddp_find_unused_parameters_true" if BATCH < 8 else "auto"
    )
    trainer.fit(model, DataLoader(data, BATCH))
    if trainer.is_global_zero:
        torch.save({"weights": model.state_dict(), "shown": model.shown, "steps": trainer.global_step}, "result.pt")
