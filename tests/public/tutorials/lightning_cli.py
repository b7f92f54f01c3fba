"""A script of LightningCLI with arguments of the Trainer, the module and the data."""

import lightning as L
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader, TensorDataset

BATCH = 8


class Model(L.LightningModule):
    def __init__(self, lr: float = 0.01, width: int = 4):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.ELU(), torch.nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        loss = (self.net(batch[0]) - batch[0].mean(1, keepdim=True)).square().mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class Data(L.LightningDataModule):
    def __init__(self, batch_size: int = 2):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(
            TensorDataset(torch.randn(40, 3, generator=torch.Generator().manual_seed(3))), self.batch_size
        )

    val_dataloader = train_dataloader


if __name__ == "__main__":
    arguments = ["fit", "--trainer.max_epochs=3", "--trainer.accelerator=cpu", "--trainer.gradient_clip_val=0.5"]
    arguments += ["--model.lr=0.05", f"--data.batch_size={BATCH}", "--trainer.callbacks+=EarlyStopping"]
    arguments += ["--trainer.callbacks.monitor=val_loss", "--trainer.callbacks.patience=9"]
    cli = LightningCLI(Model, Data, trainer_class=Trainer, args=arguments, seed_everything_default=5)
    if cli.trainer.is_global_zero:
        torch.save({"weights": cli.model.state_dict(), "steps": cli.trainer.global_step}, "result.pt")
