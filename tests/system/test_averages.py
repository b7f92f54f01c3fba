"""Metrics that cannot be computed on some of two ranks."""

from system.forks import fit_on_ranks, outputs, summary

FAILING = """
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torchmetrics import MeanMetric


class Failing(MeanMetric):
    def compute(self):
        if torch.distributed.get_rank() == 1:
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


def test_a_metric_that_raises_on_some_ranks_is_nan_on_all_and_does_not_end_training(user_folder):
    (user_folder / "failing.py").write_text(FAILING)
    arguments = ("--model", "failing.Net", "--epochs", "3", "--trainer.num_sanity_val_steps", "0", "--name", "x")
    fit_on_ranks(*arguments, folder=user_folder, world=2)
    printed = "".join(outputs(user_folder, 2))
    assert printed.count("the metric 'val/failing' cannot be computed") == 1
    metrics = summary(user_folder, "x")["metrics"]
    assert metrics["val/working"] is not None and metrics["val/failing"] is None
    ends = [(user_folder / f"end-{rank}.txt").read_text() for rank in (0, 1)]
    assert ends[0] == ends[1] and ends[0].startswith("nan ")
