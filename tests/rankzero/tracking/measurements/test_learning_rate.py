import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from reported import scalars_of

from rankzero import Trainer
from rankzero.distributed.monitoring import activity
from rankzero.tracking.measurements import interval_measurements
from rankzero.tracking.measurements.learning_rate import learning_rates
from stock import QUIET


def optimizer_with(*rates):
    return torch.optim.SGD([{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in rates])


def test_each_parameter_group_has_its_own_series():
    one, two = {"train/lr": 0.5}, {"train/lr": 0.5, "train/lr-1": 0.25}
    assert learning_rates([]) == {} and learning_rates([optimizer_with(0.5)]) == one
    assert learning_rates([optimizer_with(0.5, torch.tensor(0.25))]) == two
    assert learning_rates([optimizer_with(0.5), optimizer_with(0.25)]) == two


def fit(module, **settings):
    """Trains in the working directory, and returns the curves of the run."""
    settings = {"log_every_n_steps": 2, "limit_train_batches": 6, "max_epochs": 1, **QUIET, **settings}
    Trainer(name="x", **settings).fit(module)
    return scalars_of(Path("runs/x"))


class Scheduled(BoringModel):
    """The learning rate of the n-th step, from 0, is 0.5 to the power of n."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, (1, 3, 5)),
        ({"profiler": "simple"}, (1, 3, 5)),  # with a profiler, Lightning's own loop trains
        ({"accumulate_grad_batches": 3, "log_every_n_steps": 1}, (0, 1)),
    ],
)
def test_the_rate_is_that_of_the_step_at_which_it_is_logged(script_folder, settings, steps):
    assert fit(Scheduled(), **settings)["train/lr"] == {step: 0.5**step for step in steps}


class TwoOptimizers(BoringModel):
    """Takes a step of both optimizers per batch, in 20 ms."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization, self.now = False, time.monotonic()

    def train_dataloader(self):
        torch.manual_seed(0)  # the same data in each attempt
        return super().train_dataloader()

    def training_step(self, batch, batch_idx):
        self.now += 0.02
        for optimizer in self.optimizers():
            loss = self.step(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.log("loss", loss)

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=rate) for rate in (0.2, 0.1)]


def test_series_of_two_optimizers_have_the_same_steps_and_one_time_of_both(script_folder, monkeypatch):
    monkeypatch.setattr(interval_measurements, "DETAIL_SECONDS", 0.0)
    for settings in ({"max_steps": 6}, {}):  # three batches, then all
        model = TwoOptimizers()
        monkeypatch.setattr(activity, "monotonic", lambda model=model: model.now)
        logged = fit(model, log_every_n_steps=1, **settings)
    for tag, value in {"train/lr": 0.2, "train/lr-1": 0.1, "wall_time/step_ms": 20}.items():
        assert logged[tag] == pytest.approx(dict.fromkeys(range(6), value)), tag
    assert list(logged["loss"]) == list(logged["weights/gradient_norm"]) == list(range(6))
