import yaml

from rankzero.runs.stored_config import without_objects
from running import evaluate_here, fit_here

PARTIAL = """
import functools

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from torch.utils.data import DataLoader


class Net(LightningModule):
    def __init__(self, optimizer: OptimizerCallable = functools.partial(torch.optim.SGD, lr=0.25), act=torch.nn.ReLU()):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.hparams.act(self.layer(batch)).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val", self.layer(batch).mean())

    def configure_optimizers(self):
        return self.hparams.optimizer(self.parameters())

    def train_dataloader(self):
        return DataLoader(torch.rand(8, 2), batch_size=4)

    val_dataloader = train_dataloader
"""


def test_defaults_that_are_objects_stay_out_of_the_configuration(here, monkeypatch):
    (here / "partial_default.py").write_text(PARTIAL)
    monkeypatch.syspath_prepend(here)
    assert fit_here("--model", "partial_default.Net", "--name", "x", "--epochs", "1") == 0
    stored = yaml.safe_load((here / "runs/x/config.yaml").read_text())
    assert "Unable to serialize" not in str(stored) and "optimizer" not in stored["model"].get("init_args", {})
    assert evaluate_here("--name", "x") == 0
    assert fit_here("--model", "partial_default.Net", "--name", "x", "--epochs", "2") == 0
    assert fit_here("--config", "runs/x/config.yaml", "--name", "again") == 0


def test_all_other_values_stay():
    config = {"a": {"b": "Unable to serialize instance <x>", "c": [1, "text"]}, "d": None}
    assert without_objects(config) == {"a": {"c": [1, "text"]}, "d": None}
