from types import SimpleNamespace

import pytest
import torch

from rankzero.sampling.batch_sampler import EVEN_SHARE, Share
from rankzero.training.metrics.interval_record import IntervalRecord, samples_in


@pytest.fixture
def trainer():
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=0))
    strategy = SimpleNamespace(root_device=torch.device("cpu"), precision_plugin=SimpleNamespace())
    return SimpleNamespace(fit_loop=loop, strategy=strategy)


@pytest.fixture
def record(trainer):
    return IntervalRecord(trainer)


@pytest.mark.parametrize(("settings", "ends"), [({"interval": 3}, [2, 5]), ({}, [])])
def test_every_nth_step_ends_the_interval_and_none_does_without_logging(record, settings, ends):
    due = []
    vars(record).update(settings)
    for step in range(7):
        record.begin_batch(step)
        due += [step] * record.is_due
    assert due == ends


def test_losses_are_weighted_by_their_samples(record):
    record.add_loss(torch.tensor(2.0, requires_grad=True), 3)
    record.add_loss(torch.tensor([5.0]), 1)
    record.add_loss(torch.tensor(float("nan")), 0)  # a batch that only keeps ranks in step
    assert (record.loss_sum, record.samples) == (11.0, 4)
    record.reset()
    assert (record.loss_sum, record.samples, record.total_samples) == (0.0, 0, 4)


def test_a_resumed_interval_continues_the_sums_of_all_ranks(trainer, record):
    record.add_loss(torch.tensor(2.0), 3)
    resumed = IntervalRecord(trainer)
    resumed.load_states([record.state(False), record.state(False)])
    assert (resumed.loss_sum, resumed.samples) == (12.0, 6)


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


def test_a_batch_has_the_samples_of_its_share_or_of_its_tensors_or_one():
    batch = [torch.zeros(5, 2), torch.zeros(4)]
    assert [samples_in(batch, share) for share in (Share(3, 6, 1.0, 1.0, False), EVEN_SHARE)] == [3, 5]
    assert samples_in((), EVEN_SHARE) == samples_in(["text"], EVEN_SHARE) == samples_in(object(), EVEN_SHARE) == 1
