"""A model, and callbacks that record and stop a run, for tests that compare a resumed run with an uninterrupted one."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BaseFinetuning, BatchSizeFinder, LearningRateFinder
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rankzero.training.fit_loop import fit_loop_of
from running import fit_in_process, restore_process_state
from stock import SILENT

SAMPLES, BATCH, EPOCHS = 64, 8, 4
"""An epoch has 8 steps."""


class CountPasses(nn.Module):
    """Counts training batches; the count is extra state that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, inputs):
        self.count += self.training
        return inputs

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


class Net(LightningModule):
    """Small network with a backbone and a head; its loss depends on weights, learning rate and dropout."""

    def __init__(
        self,
        lr: float = 0.05,
        batch_size: int = BATCH,
        schedule: bool = False,
        norm: bool = False,
        extra_state: bool = False,
        samples: int = SAMPLES,
        dropout: float = 0.0,
        shuffle: bool = False,
    ) -> None:
        super().__init__()
        self.lr, self.batch_size, self.schedule, self.samples, self.shuffle = lr, batch_size, schedule, samples, shuffle
        layers = [nn.Linear(4, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.ReLU(), nn.Dropout(dropout)]
        layers += [CountPasses()] if extra_state else []
        self.backbone, self.head = nn.Sequential(*layers), nn.Linear(8, 1)

    def loss(self, batch):
        inputs, targets = batch
        return nn.functional.mse_loss(self.head(self.backbone(inputs)), targets)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch))

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=self.lr, momentum=0.9)
        if not self.schedule:
            return optimizer
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)]

    def train_dataloader(self):
        return DataLoader(self.data(), batch_size=self.batch_size, shuffle=self.shuffle)

    def val_dataloader(self):
        return DataLoader(self.data(), batch_size=self.batch_size)

    def data(self):
        inputs = torch.randn(self.samples, 4, generator=torch.Generator().manual_seed(0))
        return TensorDataset(inputs, inputs.sum(1, keepdim=True))


class Record(Callback):
    """Writes a line per batch and per epoch, and the final weights, to files in the current folder."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self._write(
            epoch=trainer.current_epoch,
            step=trainer.global_step,
            batch=batch_idx,
            rates=[group["lr"] for group in trainer.optimizers[0].param_groups],
            batches_a_step=trainer.accumulate_grad_batches,
            frozen=[name for name, parameter in pl_module.named_parameters() if not parameter.requires_grad],
            eval=[name for name, module in pl_module.named_modules() if not module.training],
        )

    def on_train_epoch_end(self, trainer, pl_module):
        self._write(metrics={name: float(value) for name, value in sorted(trainer.callback_metrics.items())})

    def on_fit_end(self, trainer, pl_module):
        torch.save(pl_module.state_dict(), "weights.pt")

    def _write(self, **line: Any) -> None:
        with Path("record.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


class StopAt(Callback):
    """Requests a stop, as a signal does, after the steps that `stops.json` lists."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        steps = json.loads(Path("stops.json").read_text())
        if steps and trainer.global_step >= steps[0]:
            Path("stops.json").write_text(json.dumps(steps[1:]))
            fit_loop_of(trainer).extra_subscribers[-1].control_channel.request_stop("a test")


class ThawByHand(Callback):
    """Freezes the backbone at first, and adds it to the optimizer in the second epoch, as many users' callbacks do."""

    def setup(self, trainer, pl_module, stage):
        pl_module.backbone.requires_grad_(False)

    def on_train_epoch_start(self, trainer, pl_module):
        pl_module.backbone.train(trainer.current_epoch >= 1)
        if trainer.current_epoch == 1:
            pl_module.backbone.requires_grad_(True)
            trainer.optimizers[0].add_param_group({"params": list(pl_module.backbone.parameters()), "lr": 0.01})


class Thaw(BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.backbone, train_bn=False)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.01)


class ZeroAtTheEnd(Callback):
    """Replaces the weights after training, as callbacks that average weights do."""

    def on_train_end(self, trainer, pl_module):
        for parameter in pl_module.parameters():
            parameter.data.zero_()


class FindRateLater(LearningRateFinder):
    on_fit_start = Callback.on_fit_start

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 2:
            self.lr_find(trainer, pl_module)


class FindSizeLater(BatchSizeFinder):
    on_fit_start = Callback.on_fit_start

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 2:
            self.scale_batch_size(trainer, pl_module)


def fit_in(folder: Path, *arguments: str, stops: Sequence[int] = ()) -> dict[str, Any]:
    """Fits in a folder, stops after the given steps, resumes until the run is finished, and returns its results."""
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("stops.json").write_text(json.dumps(stops))
        command = ("--model", "resuming.Net", "--run", "x", "--epochs", str(EPOCHS), *arguments)
        command += ("--trainer.callbacks+=resuming.StopAt", "--trainer.callbacks+=resuming.Record")
        codes = [fit_in_process(*command)]
        while codes[-1] == 75 and len(codes) < 9:
            codes.append(fit_in_process(*command))
        assert codes == [75] * len(stops) + [0]
        newest = sorted(Path("runs/x/checkpoints").glob("step-*"))[-1]
        state = torch.load(newest / "state.pt", weights_only=True)
        callbacks = {name: value for name, value in state["callbacks"].items() if "Timer" not in name}
        return {
            **_record(),
            "saved weights": state["state_dict"],
            "summary": json.loads(Path("runs/x/summary.json").read_text()),
            "state": state,
            "callbacks": _without_folder(str(folder), callbacks),
        }


def _without_folder(folder: str, value: Any) -> Any:
    """Returns a callback's state with the folder removed from its paths."""
    if isinstance(value, dict):
        return {_without_folder(folder, key): _without_folder(folder, entry) for key, entry in value.items()}
    return value.replace(folder, "") if isinstance(value, str) else value


def fit_stock(folder: Path, *arguments: str) -> dict[str, Any]:
    """Fits with stock LightningCLI, without Rankzero, and returns the results."""
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch, restore_process_state():
        patch.chdir(folder)
        defaults = {**SILENT, "max_epochs": EPOCHS, "enable_checkpointing": "ModelCheckpoint" in str(arguments)}
        settings = {"run": False, "save_config_callback": None, "seed_everything_default": 0}
        flags = [*arguments, "--trainer.callbacks+=resuming.Record"]
        cli = LightningCLI(Net, args=flags, trainer_defaults=defaults, **settings)
        cli.trainer.fit(cli.model)
        return _record()


def _record() -> dict[str, Any]:
    return {
        "record": [json.loads(line) for line in Path("record.jsonl").read_text().splitlines()],
        "weights": torch.load("weights.pt", weights_only=True),
    }
