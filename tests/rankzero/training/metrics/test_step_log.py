import copy
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torchmetrics
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.data import extract_batch_size

from rankzero.sampling.batch_sampler import EVEN_SHARE, Share
from rankzero.sampling.loader import batch_size, samples_in
from rankzero.training.metrics.step_log import IntervalRecord
from stock import BATCHES, Net, assert_equals_stock, calls_of, observe, observe_error, of_stock, train, with_methods


class KeepsLog(Net):
    """Module that stores `self.log` and calls it from other hooks, and logs metrics of torchmetrics."""

    def training_step(self, batch, batch_idx):
        log = self.stored_log = self.log
        loss = super().training_step(batch, batch_idx)
        self.log("error of steps and epochs", self.error, on_step=True, on_epoch=True)
        self.log("fresh", torchmetrics.MeanMetric()(loss.detach()))
        loss.register_hook(lambda gradient: log("gradient", gradient * 2))
        loss.register_hook(lambda gradient: self.log("current gradient", gradient * 2))
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.stored_log("at the end", float(batch_idx))
        self.stored_log("number", batch_idx + 7.0)  # the same name and settings as in training_step

    def on_train_epoch_end(self):
        self.stored_log("of the epoch", 3.0)


def observe_results(uses_rankzero, make_module, *arguments, **settings):
    """Trains a module; returns the results, the module's `seen`, and the values gathered in the epoch, by their key."""
    module = make_module(*arguments)
    result, trainer = train(uses_rankzero, module, **settings)
    gathered = {key: metric.value for key, metric in trainer.fit_loop.epoch_loop._results.items()}
    return result, getattr(module, "seen", None), gathered


def test_stored_log_logs_for_the_hook_that_calls_it_and_metrics_have_lightnings_values():
    keys = [*assert_equals_stock(observe_results, KeepsLog)[2]]
    assert {"backward.gradient", "backward.current gradient", "on_train_batch_end.at the end"} <= {*keys}


def test_copy_of_a_module_made_within_its_step_uses_its_own_log():
    copies = []

    class Copies(Net):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                trainer, self.trainer = self.trainer, None
                copies.append(copy.deepcopy(self))
                self.trainer = trainer
            return super().training_step(batch, batch_idx)

    train(True, Copies(), max_epochs=1)
    assert copies[0].log.__self__ is copies[0] and copies[0].log.__func__ is LightningModule.log


Subclass = type("Subclass", (torch.Tensor,), {})
VALUES = {
    "a float": lambda batch_idx: batch_idx / 3,
    "an int": lambda batch_idx: batch_idx,
    "a large int": lambda batch_idx: 2**24 + 1 + batch_idx,
    "a bool": lambda batch_idx: batch_idx % 2 == 0,
    "infinity": lambda batch_idx: float("inf") if batch_idx == 2 else 1.0,
    "NaN": lambda batch_idx: float("nan") if batch_idx == 2 else 1.0,
    "float16": lambda batch_idx: torch.tensor(batch_idx / 3, dtype=torch.float16),
    "bfloat16": lambda batch_idx: torch.tensor(batch_idx / 3, dtype=torch.bfloat16),
    "float64": lambda batch_idx: torch.tensor(batch_idx / 3, dtype=torch.float64),
    "int64": lambda batch_idx: torch.tensor(batch_idx),
    "one element": lambda batch_idx: torch.tensor([batch_idx / 3]),
    "one element in three dimensions": lambda batch_idx: torch.full((1, 1, 1), batch_idx / 3),
    "with a gradient": lambda batch_idx: torch.tensor(batch_idx / 3, requires_grad=True) * 2,
    "of a subclass": lambda batch_idx: torch.tensor(batch_idx / 3).as_subclass(Subclass),
    "of another type in each batch": lambda batch_idx: (1.5, torch.tensor(2), torch.tensor([2.5]))[batch_idx % 3],
}
SETTINGS = {
    "on_step": {"on_step": True, "on_epoch": False},
    "on_epoch": {"on_step": False, "on_epoch": True},
    "both": {"on_step": True, "on_epoch": True, "prog_bar": True},
    "weighted": {"on_epoch": True, "batch_size": 3},
    "sum": {"on_epoch": True, "reduce_fx": "sum"},
    "min": {"on_epoch": True, "reduce_fx": "min"},
    "max": {"on_epoch": True, "reduce_fx": torch.max},
    "sync_dist": {"on_epoch": True, "sync_dist": True, "rank_zero_only": True},
    "without a logger": {"on_epoch": True, "logger": False},
}


class LogsValues(Net):
    """Module that logs all values with the same settings, one of them twice per step, and another not in every step."""

    def __init__(self, settings):
        super().__init__()
        self.settings, self.seen = SETTINGS[settings], []

    def training_step(self, batch, batch_idx):
        for name, value in VALUES.items():
            self.log(name, value(batch_idx), **self.settings)
            if name == "a float":
                self.log(name, value(batch_idx) + 1, **self.settings)
        if batch_idx > 2:
            self.log("late", batch_idx, **self.settings)
        return self.loss(batch)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append({name: value.clone() for name, value in self.trainer.callback_metrics.items()})


def observe_values(uses_rankzero, settings, dtype):
    torch.set_default_dtype(dtype)
    try:
        return observe_results(uses_rankzero, LogsValues, settings, limit_train_batches=5, limit_val_batches=0)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("settings", "dtype"), [*product(SETTINGS, [torch.float32]), ("both", torch.float64)])
def test_logged_values_equal_lightnings_with_any_default_dtype(settings, dtype):
    assert_equals_stock(observe_values, settings, dtype)


def test_lightnings_log_is_called_once_per_epoch_for_each_plain_value():
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss)
        self.log("number", batch_idx)
        self.log("whole", torch.tensor(batch_idx).long())
        return loss

    module = with_methods("LogsThree", training_step=training_step)()
    calls = calls_of([LightningModule.log], "name", lambda: train(True, module, limit_val_batches=0))
    assert (calls.count("loss"), calls.count("number"), calls.count("whole")) == (2, 2, 2 * BATCHES)


LOGS = {
    "other settings": lambda self, batch_idx: self.log("x", 1.0, on_epoch=batch_idx == 2),
    "two numbers": lambda self, batch_idx: self.log("x", torch.ones(2 if batch_idx == 2 else 1)),
    "nowhere": lambda self, batch_idx: self.log("x", 1.0, on_step=batch_idx < 2, on_epoch=False),
    "text": lambda self, batch_idx: self.log("x", "text" if batch_idx == 2 else 1.0),
    "a metric under the name of a number": lambda self, batch_idx: self.log("x", self.error if batch_idx == 2 else 1.0),
}


@pytest.mark.parametrize("case", LOGS)
def test_log_errors_in_a_later_batch_equal_lightnings_and_leave_the_modules_own_log(case):
    def training_step(self, batch, batch_idx):
        LOGS[case](self, batch_idx)
        return self.loss(batch)

    module = with_methods("Logs", training_step=training_step)()
    error = observe_error(True, lambda: module)
    assert error == of_stock(observe_error, type(module)) and error[2] == 2
    assert "log" not in vars(module)


def test_log_overridden_in_the_class_or_instance_is_called():
    def log(self, name, value, **settings):
        Net.log(self, f"own {name}", value, **settings)

    assert "own loss" in assert_equals_stock(observe, with_methods("OverridesLog", log=log))["metrics"]
    module = Net()
    logged_names = []
    module.log = lambda name, value, **settings: logged_names.append(name)
    _, trainer = train(True, module, max_epochs=1, limit_val_batches=0)
    assert logged_names.count("loss") == BATCHES and "loss" not in trainer.callback_metrics


@pytest.fixture
def trainer():
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(steps_done=0))
    strategy = SimpleNamespace(root_device=torch.device("cpu"), precision_plugin=SimpleNamespace())
    return SimpleNamespace(fit_loop=loop, strategy=strategy)


def test_losses_are_weighted_by_their_samples(trainer):
    record = IntervalRecord(trainer)
    record.add_loss(torch.tensor(2.0, requires_grad=True), 3)
    record.add_loss(torch.tensor([5.0]), 1)
    record.add_loss(torch.tensor(float("nan")), 0)  # a batch that only keeps ranks in step
    assert (record.loss_sum, record.samples) == (11.0, 4)
    record.reset()
    assert (record.loss_sum, record.samples, record.total_samples) == (0.0, 0, 4)


@pytest.mark.parametrize(
    ("gradients", "norm"),
    [
        *(([[3.0], [4.0]], 5.0), ([[3.0], None], 3.0), ([None, None], None)),
        *(([[norm], [1.0]], norm) for norm in (float("inf"), float("nan"))),
    ],
)
def test_the_norm_is_that_of_all_gradients(trainer, gradients, norm):
    record = IntervalRecord(trainer)
    parameters = [torch.zeros(1, requires_grad=True) for _ in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else torch.tensor(gradient)
    record.measure_gradients(torch.optim.SGD(parameters, lr=0.1))
    assert record.gradient_norm == pytest.approx(norm, nan_ok=True)


def test_the_norm_of_sparse_or_scaled_gradients_is_unknown(trainer):
    layer = torch.nn.Embedding(5, 2, sparse=True)
    layer(torch.tensor([1])).sum().backward()
    record = IntervalRecord(trainer)
    record.measure_gradients(torch.optim.SGD(layer.parameters(), lr=0.1))
    assert record.gradient_norm is None
    trainer.strategy.precision_plugin.scaler = object()
    parameter = torch.ones(1, requires_grad=True)
    parameter.grad = torch.ones(1)
    for is_fused, norm in ((False, 1.0), (True, None)):
        record = IntervalRecord(trainer)
        record.measure_gradients(torch.optim.SGD([parameter], lr=0.1, fused=is_fused))
        assert record.gradient_norm == norm


@dataclass
class Batch:
    images: object
    labels: object = None


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        *((torch.rand(5, 2), 5), ([torch.rand(3, 2), torch.rand(4)], 3), ([[torch.zeros(6)], torch.zeros(4)], 6)),
        *(((["a", "b"], torch.zeros(2, 3)), 2), ({"a": "text", "b": [torch.rand(6)]}, 6)),
        *(({1: (None, torch.rand(2))}, 2), (Batch(torch.rand(7, 1)), 7)),
    ],
)
def test_a_batch_has_the_samples_of_its_share_or_the_size_that_lightning_finds(batch, size):
    assert samples_in(batch, Share(2, 6, 1.0, 1.0, False)) == 2
    assert samples_in(batch, EVEN_SHARE) == batch_size(batch) == extract_batch_size(batch) == size


@pytest.mark.parametrize("batch", [None, ["a", "b"], list(range(10**6)), [], object()])
def test_a_batch_without_tensors_has_no_size_and_counts_as_one_sample(batch):
    assert batch_size(batch) is None and samples_in(batch, EVEN_SHARE) == 1
