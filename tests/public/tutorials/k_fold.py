"""Cross-validation: a new module and a new Trainer for each fold."""

import lightning as L
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, Subset, TensorDataset

BATCH = 8
FOLDS = 3


class Net(L.LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def validation_step(self, batch, _):
        self.log("val_loss", self.training_step(batch, _), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


if __name__ == "__main__":
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(2))
    dataset = TensorDataset(x, x.prod(1, keepdim=True))
    scores, weights = [], []
    for fold in range(FOLDS):
        held_out = [index for index in range(48) if index % FOLDS == fold]
        kept = [index for index in range(48) if index % FOLDS != fold]
        torch.manual_seed(fold)
        model = Net(lr=0.02)
        trainer = Trainer(max_epochs=2, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False)
        val_loader = DataLoader(Subset(dataset, held_out), BATCH)
        trainer.fit(model, DataLoader(Subset(dataset, kept), BATCH), val_loader)
        scores += trainer.validate(model, val_loader, verbose=False)
        weights.append(model.state_dict())
    if trainer.is_global_zero:
        torch.save({"scores": scores, "weights": weights}, "result.pt")
