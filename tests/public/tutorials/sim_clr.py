"""Contrastive learning with the package `pytorch_lightning`, as most public code imports it."""

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer
from pytorch_lightning.callbacks import LearningRateMonitor, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset

BATCH = 8


class Views(Dataset):
    def __init__(self, count):
        self.points = torch.randn(count, 6, generator=torch.Generator().manual_seed(5))

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return [self.points[index], self.points[index].roll(1)]


class SimCLR(pl.LightningModule):
    def __init__(self, hidden_dim, lr, temperature=0.5, max_epochs=3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(6, 2 * hidden_dim), nn.ReLU(inplace=True), nn.Linear(2 * hidden_dim, hidden_dim)
        )

    def info_nce_loss(self, batch, mode="train"):
        feats = self.net(torch.cat(batch, dim=0))
        similarity = F.cosine_similarity(feats[:, None, :], feats[None, :, :], dim=-1)
        itself = torch.eye(len(similarity), dtype=torch.bool)
        similarity = similarity.masked_fill(itself, -9e15) / self.hparams.temperature
        nll = (-similarity[itself.roll(len(feats) // 2, 0)] + torch.logsumexp(similarity, dim=-1)).mean()
        self.log(f"{mode}_loss", nll, sync_dist=True)
        return nll

    def training_step(self, batch, batch_idx):
        return self.info_nce_loss(batch)

    def validation_step(self, batch, batch_idx):
        self.info_nce_loss(batch, mode="val")

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.hparams.max_epochs)]


if __name__ == "__main__":
    pl.seed_everything(42)
    best = ModelCheckpoint(save_weights_only=True, mode="min", monitor="val_loss")
    trainer = Trainer(accelerator="cpu", max_epochs=3, callbacks=[best, LearningRateMonitor("epoch")])
    model = SimCLR(hidden_dim=4, lr=5e-3)
    trainer.fit(model, DataLoader(Views(48), BATCH, drop_last=True), DataLoader(Views(16), BATCH))
    loaded = SimCLR.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
    if trainer.is_global_zero:
        result = {"weights": model.state_dict(), "best": loaded.state_dict(), "score": float(best.best_model_score)}
        torch.save(result, "result.pt")
