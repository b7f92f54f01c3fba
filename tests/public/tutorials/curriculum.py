"""Curriculum: one Trainer fits easy samples, then hard ones, then all, with more epochs each time."""

import lightning as L
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, TensorDataset

BATCH = 8


class Regressor(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(5, 1)
        self.stages = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_train_epoch_end(self):
        self.stages.append((self.current_epoch, self.global_step))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}


if __name__ == "__main__":
    torch.manual_seed(0)
    x = torch.randn(96, 5)
    difficulty = x.norm(dim=1).argsort()
    data = TensorDataset(x[difficulty], x[difficulty].sum(1, keepdim=True))
    stages = [torch.utils.data.Subset(data, range(32)), torch.utils.data.Subset(data, range(32, 96)), data]
    model = Regressor()
    trainer = Trainer(max_epochs=2, accelerator="cpu", enable_model_summary=False)
    for number, stage in enumerate(stages):
        trainer.fit_loop.max_epochs = 2 * (number + 1)
        trainer.fit(model, DataLoader(stage, BATCH))
    if trainer.is_global_zero:
        torch.save({"weights": model.state_dict(), "stages": model.stages, "epoch": trainer.current_epoch}, "result.pt")
