"""Habits of a Hydra template: classes by `_target_`, containers that are no list and no dict, a folder per job."""

import importlib
import os
from collections import UserDict, UserList
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, TensorDataset

BATCH = 8
CFG = {
    "model": {"_target_": "__main__.LitModel", "width": 6},
    "callbacks": {
        "checkpoint": {
            "_target_": "lightning.pytorch.callbacks.ModelCheckpoint",
            "dirpath": "checkpoints",
            "monitor": "val/loss",
            "save_last": True,
        },
        "early": {"_target_": "lightning.pytorch.callbacks.EarlyStopping", "monitor": "val/loss", "patience": 5},
    },
    "logger": {"csv": {"_target_": "lightning.pytorch.loggers.CSVLogger", "save_dir": "csv", "name": ""}},
    "trainer": {"max_epochs": 3, "accelerator": "cpu", "log_every_n_steps": 2, "deterministic": True},
}


def instantiate(config, **settings):
    package, _, name = config["_target_"].rpartition(".")
    arguments = {key: value for key, value in config.items() if key != "_target_"}
    return getattr(importlib.import_module(package), name)(**UserDict({**arguments, **settings}))


class LitModel(L.LightningModule):
    def __init__(self, width):
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train/loss", loss, on_step=False, on_epoch=True, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", torch.nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.03)


if __name__ == "__main__":
    Path("outputs/job").mkdir(parents=True, exist_ok=True)
    os.chdir("outputs/job")
    L.seed_everything(12345, workers=True)
    x = torch.randn(64, 4)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), BATCH)
    model = instantiate(CFG["model"])
    callbacks = UserList(instantiate(callback) for callback in CFG["callbacks"].values())
    loggers = UserList(instantiate(logger) for logger in CFG["logger"].values())
    trainer = Trainer(**UserDict(CFG["trainer"]), callbacks=callbacks, logger=loggers)
    trainer.fit(model=model, train_dataloaders=loader, val_dataloaders=loader, ckpt_path=None)
    tested = trainer.test(model=model, dataloaders=loader, ckpt_path=trainer.checkpoint_callback.best_model_path)
    if trainer.is_global_zero:
        score = float(trainer.checkpoint_callback.best_model_score)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        result = {"weights": model.state_dict(), "tested": tested, "score": score, "metrics": metrics}
        torch.save({**result, "files": sorted(os.listdir("checkpoints"))}, "../../result.pt")
