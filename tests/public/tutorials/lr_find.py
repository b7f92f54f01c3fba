"""Learning-rate finder before the training, as in the documentation of the Tuner."""

import lightning as L
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader, TensorDataset

BATCH = 8


class Classifier(L.LightningModule):
    def __init__(self, learning_rate=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def train_dataloader(self):
        x = torch.randn(160, 6, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=BATCH)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


if __name__ == "__main__":
    L.seed_everything(7)
    model = Classifier()
    trainer = Trainer(max_epochs=2, accelerator="cpu", enable_progress_bar=False)
    lr_finder = Tuner(trainer).lr_find(model, num_training=20)
    model.learning_rate = lr_finder.suggestion() or 0.01
    trainer.fit(model)
    if trainer.is_global_zero:
        result = {"weights": model.state_dict(), "rates": lr_finder.results["lr"], "losses": lr_finder.results["loss"]}
        torch.save({**result, "steps": trainer.global_step}, "result.pt")
