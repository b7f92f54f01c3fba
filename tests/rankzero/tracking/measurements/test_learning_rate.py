import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from reported import scalars_of

from rankzero import Trainer
from rankzero.tracking.measurements.learning_rate import learning_rates


def optimizer_with(*rates):
    return torch.optim.SGD([{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in rates])


@pytest.mark.parametrize(
    ("optimizers", "expected"),
    [
        ([], {}),
        ([optimizer_with(0.5)], {"train/lr": 0.5}),
        ([optimizer_with(0.5, torch.tensor(0.25))], {"train/lr": 0.5, "train/lr-1": 0.25}),
        ([optimizer_with(0.5), optimizer_with(0.25)], {"train/lr": 0.5, "train/lr-1": 0.25}),
    ],
)
def test_each_parameter_group_has_its_own_series(optimizers, expected):
    assert learning_rates(optimizers) == expected


def fit(module, **settings):
    quiet = {"accelerator": "cpu", "enable_model_summary": False, "enable_progress_bar": False, "name": "x"}
    Trainer(**{"log_every_n_steps": 2, "limit_train_batches": 6, "max_epochs": 1, **quiet, **settings}).fit(module)
    return module


class Scheduled(BoringModel):
    """The learning rate of the n-th step, from 0, is 0.5 to the power of n."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


@pytest.mark.parametrize("profiler", [None, "simple"])  # with a profiler, Lightning's own loop trains
def test_the_rate_is_that_of_the_step_at_which_it_is_logged(script_folder, profiler):
    fit(Scheduled(), profiler=profiler)
    assert scalars_of(script_folder / "runs/x")["train/lr"] == {step: 0.5**step for step in (1, 3, 5)}


def test_the_rate_is_that_of_the_accumulated_step(script_folder):
    fit(Scheduled(), accumulate_grad_batches=3, log_every_n_steps=1)
    assert scalars_of(script_folder / "runs/x")["train/lr"] == {0: 1.0, 1: 0.5}


class TwoOptimizers(BoringModel):
    """Takes a step of both optimizers per batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def train_dataloader(self):
        torch.manual_seed(0)  # the same data in each attempt
        return super().train_dataloader()

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            loss = self.step(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.log("loss", loss)

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=rate) for rate in (0.2, 0.1)]


def test_all_series_of_two_optimizers_have_the_same_steps(script_folder):
    fit(TwoOptimizers())
    logged = scalars_of(script_folder / "runs/x")
    assert logged["train/lr"] == pytest.approx(dict.fromkeys((1, 3, 5), 0.2))
    assert logged["train/lr-1"] == pytest.approx(dict.fromkeys((1, 3, 5), 0.1))
    assert logged["loss"].keys() == logged["train/lr"].keys() == logged["weights/gradient_norm"].keys()


def test_a_resumed_run_of_two_optimizers_has_one_curve(script_folder):
    fit(TwoOptimizers(), log_every_n_steps=1, max_steps=6)  # three batches
    fit(TwoOptimizers(), log_every_n_steps=1)
    assert list(scalars_of(script_folder / "runs/x")["loss"]) == list(range(6))


def test_log_every_n_steps_of_zero_logs_nothing(script_folder):
    fit(BoringModel(), log_every_n_steps=0)
    assert "train/lr" not in scalars_of(script_folder / "runs/x")
