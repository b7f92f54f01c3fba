from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.utilities.data import extract_batch_size

from rankzero.sampling.batch_sampler import EVEN_SHARE, Share
from rankzero.sampling.loader import batch_size, samples_in
from rankzero.training.metrics.epoch_averages import Results, gathered_values, merge
from rankzero.training.metrics.step_log import IntervalRecord
from stock import differences


@pytest.fixture
def trainer():
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=0))
    strategy = SimpleNamespace(root_device=torch.device("cpu"), precision_plugin=SimpleNamespace())
    return SimpleNamespace(fit_loop=loop, strategy=strategy)


@pytest.fixture
def record(trainer):
    return IntervalRecord(trainer)


def test_losses_are_weighted_by_their_samples(record):
    record.add_loss(torch.tensor(2.0, requires_grad=True), 3)
    record.add_loss(torch.tensor([5.0]), 1)
    record.add_loss(torch.tensor(float("nan")), 0)  # a batch that only keeps ranks in step
    assert (record.loss_sum, record.samples) == (11.0, 4)
    record.reset()
    assert (record.loss_sum, record.samples, record.total_samples) == (0.0, 0, 4)


@pytest.mark.parametrize(
    ("gradients", "norm"),
    [
        ([[3.0], [4.0]], 5.0),
        ([[3.0], None], 3.0),
        ([None, None], None),
        ([[float("inf")], [1.0]], float("inf")),
        ([[float("nan")], [1.0]], float("nan")),
    ],
)
def test_the_norm_is_that_of_all_gradients(record, gradients, norm):
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
        (torch.rand(5, 2), 5),
        ([torch.rand(3, 2), torch.rand(4)], 3),
        ([[torch.zeros(6)], torch.zeros(4)], 6),
        ((["a", "b"], torch.zeros(2, 3)), 2),
        ({"a": "text", "b": [torch.rand(6)]}, 6),
        ({1: (None, torch.rand(2))}, 2),
        (Batch(torch.rand(7, 1)), 7),
    ],
)
def test_a_batch_has_the_samples_of_its_share_or_the_size_that_lightning_finds(batch, size):
    assert samples_in(batch, Share(2, 6, 1.0, 1.0, False)) == 2
    assert samples_in(batch, EVEN_SHARE) == batch_size(batch) == extract_batch_size(batch) == size


@pytest.mark.parametrize("batch", [None, ["a", "b"], list(range(10**6)), [], object()])
def test_a_batch_without_tensors_has_no_size_and_counts_as_one_sample(batch):
    assert batch_size(batch) is None and samples_in(batch, EVEN_SHARE) == 1


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
