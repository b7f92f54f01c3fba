import math
import warnings
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.demos.boring_classes import BoringModel
from reported import scalars_of
from torchmetrics import MeanMetric

from rankzero import Trainer
from rankzero.training.metrics.epoch_averages import Results, gathered_values, merge
from stock import QUIET, differences

LIMITS = {"max_epochs": 4, "limit_train_batches": 3, "limit_val_batches": 2, "num_sanity_val_steps": 0}
SETTINGS = {**QUIET, **LIMITS, "name": "x"}


class Failing(MeanMetric):
    def __init__(self):
        super().__init__()
        self.computed = 0

    def compute(self):
        self.computed += 1
        if self.computed in (2, 3):
            raise ArithmeticError("no samples of class 7")
        return super().compute()


class Net(BoringModel):
    def __init__(self, stage):
        super().__init__()
        self.stage, self.failing = stage, Failing()

    def log_failing(self, stage, loss):
        if self.stage == stage:
            self.failing.update(loss.detach())
            self.log(f"{stage}/failing", self.failing, on_step=False, on_epoch=True)

    def training_step(self, batch, batch_idx):
        outputs = super().training_step(batch, batch_idx)
        self.log_failing("train", outputs["loss"])
        return outputs

    def validation_step(self, batch, batch_idx):
        loss = super().validation_step(batch, batch_idx)["x"]
        self.log("val/loss", loss)
        self.log_failing("val", loss)


@pytest.mark.parametrize(
    ("stage", "hook", "epochs"),
    [("train", "on_fit_end", 3), ("train", "on_fit_end", 4), ("val", "on_train_epoch_end", 4)],
)
def test_the_value_of_a_metric_that_raises_is_nan_with_one_warning(script_folder, stage, hook, epochs):
    """Callbacks see NaN at the end, and not the value of the previous epoch."""
    seen, name = [], f"{stage}/failing"
    recorder = LambdaCallback(**{hook: lambda trainer, _: seen.append(float(trainer.callback_metrics[name]))})
    trainer = Trainer(**{**SETTINGS, "max_epochs": epochs}, callbacks=[recorder])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Net(stage))
    texts = [str(warning.message) for warning in caught if "cannot be computed" in str(warning.message)]
    assert texts == [
        f"rankzero: the metric '{name}' cannot be computed and is NaN in this epoch; training continues: "
        "ArithmeticError('no samples of class 7')"
    ]
    curves = scalars_of(script_folder / "runs/x")
    assert trainer.current_epoch == len(curves["val/loss"]) == epochs
    values, is_nan = curves[name], [False, True, True, False][:epochs]
    assert list(values) == [2, 5, 8, 11][:epochs] and [*map(math.isnan, values.values())] == is_nan
    assert [*map(math.isnan, seen)] == (is_nan if hook == "on_train_epoch_end" else is_nan[-1:])


@pytest.mark.parametrize(
    "error",
    [
        torch.distributed.DistBackendError("timed out"),
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"),
    ],
)
def test_lost_ranks_and_a_lack_of_memory_end_training(script_folder, error):
    net = Net("val")
    net.failing.compute = Mock(side_effect=error)
    with pytest.raises(type(error)):
        Trainer(**SETTINGS).fit(net)


def test_a_metric_that_raises_outside_of_training_or_has_no_tensor_ends_the_run_as_in_stock_lightning(script_folder):
    net = Net("val")
    for function in ("fit", "validate"):
        net.failing.computed = 1
        with pytest.raises(ArithmeticError):
            getattr(Trainer(**{**SETTINGS, "num_sanity_val_steps": 1}), function)(net)
    net.failing.compute = lambda: {"a": torch.tensor(1.0)}
    with pytest.raises(ValueError, match="must be a tensor"):
        Trainer(**SETTINGS).fit(net)


def log(results, value, name="loss", size=1, **settings):
    results.log("training_step", name, torch.tensor(value), batch_size=size, on_step=False, on_epoch=True, **settings)


def results_of(*values, **settings):
    results = Results(None)
    for number, value in enumerate(values):
        log(results, value, size=number + 1, **settings)
    return results


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [("mean", (1 * 1 + 4 * 2 + 2 * 1 + 7 * 2 + 1 * 3) / 9), ("sum", 15.0), ("max", 7.0), ("min", 1.0)],
)
def test_merged_values_of_several_ranks_equal_those_of_one_process(reduction, expected):
    values = [gathered_values(results_of(*logged, reduce_fx=reduction)) for logged in ((1.0, 4.0), (2.0, 7.0, 1.0), ())]
    entry = merge(values)["training_step.loss"]
    value = entry["value"] / entry["weight"] if reduction == "mean" else entry["value"]
    assert float(value) == pytest.approx(expected)
    assert set(merge([{}, values[0]])) == {"training_step.loss"}


@pytest.mark.parametrize("reduction", ["mean", "sum", "max", "min"])
def test_resumed_epoch_values_equal_uninterrupted_values(reduction):
    values = [0.1, 0.7, 0.2, 0.3]
    uninterrupted = results_of(*values, reduce_fx=reduction)
    resumed = Results(None)
    resumed.resumed_values = gathered_values(results_of(*values[:2], reduce_fx=reduction))
    assert gathered_values(resumed).keys() == gathered_values(uninterrupted).keys()
    for number in (2, 3):
        log(resumed, values[number], size=number + 1, reduce_fx=reduction)
    assert not resumed.resumed_values
    assert differences(gathered_values(resumed), gathered_values(uninterrupted)) == []


def test_rank_zero_only_metric_is_not_gathered():
    assert not gathered_values(results_of(1.0, rank_zero_only=True))
