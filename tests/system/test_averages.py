"""Compares the averaged metrics that two ranks read with those under stock Lightning."""

import json

import pytest

from system.forks import fit_on_ranks, outputs, summary

READERS = """
import json

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCHES = 4, 6


class Reader(LightningModule):
    def __init__(self, reads: str = "in the step"):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.reads, self.seen, self.rates = reads, [], []
        self.automatic_optimization = reads != "held, manual"

    def read(self):
        names = ("x", "largest", "sum")
        self.seen.append([float(self.trainer.callback_metrics[name]) for name in names])

    def training_step(self, batch, batch_idx):
        value = float(batch_idx) + 10 * self.global_rank + 100 * self.current_epoch
        self.log("x", value, sync_dist=True)
        self.log("largest", value, sync_dist=True, reduce_fx="max")
        self.log("sum", value, sync_dist=True, reduce_fx="sum", on_step=True, on_epoch=True)
        group = torch.distributed.group.WORLD
        self.log("grouped", value, sync_dist=True, sync_dist_group=group, on_step=True, on_epoch=True)
        if self.reads == "in the step":
            self.read()
        if self.reads == "on rank zero" and self.global_rank == 0:
            self.read()
        late = self.reads == "late" or (self.reads == "late on rank one" and self.global_rank == 1)
        if late and self.current_epoch == 2:
            self.read()
        loss = self.layer(batch[0]).mean()
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        if self.reads == "in a hook":
            self.read()
        if self.held is not None and batch_idx:
            self.seen.append(float(self.held["x"]))

    def on_train_start(self):
        self.held = self.trainer.callback_metrics if self.reads.startswith("held") else None

    def on_train_epoch_end(self):
        self.seen.append({name: float(value) for name, value in sorted(self.trainer.callback_metrics.items())})

    def on_train_end(self):
        with open(f"{self.reads}-{self.global_rank}.json", "w") as file:
            json.dump({"seen": self.seen, "rates": self.rates}, file)

    def rate(self, step):
        if self.reads != "in a schedule" or not step:
            return 1.0
        return 1 / (1 + float(self.trainer.callback_metrics["x"]))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.rand(BATCHES * 4, 2)), batch_size=2)


if __name__ == "__main__":
    import sys
    import warnings

    warnings.simplefilter("always")
    package, *cases = sys.argv[1:]
    settings = {"strategy": "ddp", "devices": 2, "logger": False, "enable_checkpointing": False}
    if package == "rankzero":
        from rankzero import Trainer
    for number, reads in enumerate(cases):
        print(f"case: {reads}", flush=True)
        if package == "rankzero":
            settings = {"name": f"case-{number}"}
        trainer = Trainer(
            accelerator="cpu", max_epochs=EPOCHS, log_every_n_steps=4, enable_progress_bar=False,
            enable_model_summary=False, **settings
        )
        trainer.fit(Reader(reads))
"""

READ_CASES = (
    *("in the step", "in a hook", "on rank zero", "held", "held, manual", "in a schedule"),
    *("late", "late on rank one", "never"),
)


@pytest.fixture(scope="module")
def read_values(tmp_path_factory):
    """Returns what two ranks read in each of `READ_CASES`, with stock Lightning and with Rankzero."""
    folder = tmp_path_factory.mktemp("read")
    (folder / "readers.py").write_text(READERS)
    found = []
    for package in ("stock", "rankzero"):
        (folder / package).mkdir()
        fit_on_ranks(package, *READ_CASES, script=str(folder / "readers.py"), folder=folder / package, world=2)
        files = {reads: [folder / package / f"{reads}-{rank}.json" for rank in (0, 1)] for reads in READ_CASES}
        found.append({reads: [json.loads(file.read_text()) for file in pair] for reads, pair in files.items()})
    return found


@pytest.mark.xdist_group("averages")
@pytest.mark.parametrize("reads", READ_CASES)
def test_two_ranks_read_stock_lightnings_averages(reads, read_values):
    stock, found = (values[reads] for values in read_values)
    assert found == stock


FAILING = """
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torchmetrics import MeanMetric


class Failing(MeanMetric):
    def compute(self):
        if torch.distributed.get_rank() in RANKS:
            raise ArithmeticError("no samples of class 7")
        return super().compute()


class Net(BoringModel):
    def __init__(self):
        super().__init__()
        self.failing, self.working, self.on_rank_zero = Failing(), MeanMetric(), MeanMetric()

    def validation_step(self, batch, batch_idx):
        loss = super().validation_step(batch, batch_idx)["x"]
        self.failing.update(loss)
        self.working.update(loss)
        self.log("val/failing", self.failing)
        self.log("val/working", self.working)

    def on_validation_epoch_end(self):
        self.on_rank_zero.update(1.0)
        self.on_rank_zero.compute()  # synchronizes; then, rank zero alone can log the value
        if self.trainer.is_global_zero:
            self.log("val/rank_zero", self.on_rank_zero, rank_zero_only=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val/failing"}}

    def on_fit_end(self):
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        with open(f"end-{self.global_rank}.txt", "w") as file:
            file.write(f"{self.trainer.callback_metrics['val/failing']} {rate} {self.layer.weight.sum().item()}")
"""


@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
def test_a_metric_that_raises_on_some_ranks_is_nan_on_all_and_does_not_end_training(ranks, user_folder):
    (user_folder / "failing.py").write_text(FAILING.replace("RANKS", str(ranks)))
    arguments = ("--model", "failing.Net", "--epochs", "3", "--trainer.num_sanity_val_steps", "0", "--name", "x")
    fit_on_ranks(*arguments, folder=user_folder, world=2)
    printed = "".join(outputs(user_folder, 2))
    assert printed.count("the metric 'val/failing' cannot be computed") == 1
    metrics = summary(user_folder, "x")["metrics"]
    assert metrics["val/working"] is not None and metrics["val/failing"] is None
    ends = [(user_folder / f"end-{rank}.txt").read_text() for rank in (0, 1)]
    assert ends[0] == ends[1] and ends[0].startswith("nan ")
