"""A small vision transformer that keeps the best checkpoint by accuracy, and loads it for the test."""

import lightning as L
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

BATCH = 8


class ViT(L.LightningModule):
    def __init__(self, model_kwargs, lr):
        super().__init__()
        self.save_hyperparameters()
        width, heads = model_kwargs["embed_dim"], model_kwargs["num_heads"]
        self.patches = nn.Linear(16, width)
        self.positions = nn.Parameter(torch.zeros(1, 4, width))
        self.encoder = nn.TransformerEncoderLayer(width, heads, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, 2)

    def forward(self, images):
        patches = images.unfold(1, 4, 4).unfold(2, 4, 4).reshape(len(images), 4, 16)
        return self.head(self.encoder(self.patches(patches) + self.positions).mean(1))

    def _calculate_loss(self, batch, mode="train"):
        images, labels = batch
        predictions = self(images)
        self.log(f"{mode}_acc", (predictions.argmax(-1) == labels).float().mean(), sync_dist=True)
        return nn.functional.cross_entropy(predictions, labels)

    def training_step(self, batch, batch_idx):
        return self._calculate_loss(batch)

    def validation_step(self, batch, batch_idx):
        self._calculate_loss(batch, mode="val")

    def test_step(self, batch, batch_idx):
        self._calculate_loss(batch, mode="test")

    def configure_optimizers(self):
        optimizer = optim.AdamW(self.parameters(), lr=self.hparams.lr, eps=1e-3)
        return [optimizer], [optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 3], gamma=0.1)]


def train_model(**kwargs):
    images = torch.randn(80, 8, 8)
    data = TensorDataset(images, (images[:, :4].mean((1, 2)) > images[:, 4:].mean((1, 2))).long())
    train, val, test = (
        DataLoader(torch.utils.data.Subset(data, part), BATCH) for part in (range(48), range(48, 64), range(64, 80))
    )
    best = ModelCheckpoint(save_weights_only=True, mode="max", monitor="val_acc")
    trainer = Trainer(
        default_root_dir="saved/ViT", accelerator="cpu", max_epochs=4, callbacks=[best, LearningRateMonitor("epoch")]
    )
    trainer.logger._log_graph = True
    trainer.logger._default_hp_metric = None
    model = ViT(**kwargs)
    trainer.fit(model, train, val)
    model = ViT.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
    results = [trainer.test(model, dataloaders=loader, verbose=False)[0]["test_acc"] for loader in (val, test)]
    if trainer.is_global_zero:
        score = float(best.best_model_score)
        torch.save({"weights": model.state_dict(), "results": results, "score": score}, "result.pt")


if __name__ == "__main__":
    L.seed_everything(42)
    train_model(model_kwargs={"embed_dim": 8, "num_heads": 2}, lr=3e-3)
