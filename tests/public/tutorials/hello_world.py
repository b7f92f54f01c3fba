"""First steps with an autoencoder: fit, read the best path, train on, test the best, load it elsewhere."""

import lightning as L
import torch
from lightning.pytorch import Trainer
from torch import nn, optim, utils

BATCH = 8


class LitAutoEncoder(L.LightningModule):
    def __init__(self, encoder, decoder):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def training_step(self, batch, batch_idx):
        x, _ = batch
        loss = nn.functional.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss)
        return loss

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self):
        return optim.Adam(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))
    decoder = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 12))
    dataset = utils.data.TensorDataset(torch.randn(64, 12), torch.zeros(64))
    train_loader = utils.data.DataLoader(dataset, batch_size=BATCH)
    autoencoder = LitAutoEncoder(encoder, decoder)
    trainer = Trainer(limit_train_batches=6, max_epochs=1, accelerator="cpu")
    trainer.fit(model=autoencoder, train_dataloaders=train_loader)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(autoencoder, train_loader)
    tested = trainer.test(autoencoder, train_loader, ckpt_path="best", verbose=False)
    checkpoint = trainer.checkpoint_callback.best_model_path
    loaded = LitAutoEncoder.load_from_checkpoint(checkpoint, encoder=encoder, decoder=decoder)
    if trainer.is_global_zero:
        torch.save({"weights": loaded.state_dict(), "tested": tested, "steps": trainer.global_step}, "result.pt")
