from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from rankzero.distributed.monitoring.activity import BACKWARD, DATA, FORWARD, Activity
from rankzero.show.measurements.throughput import FlopCount, can_count


def count(module, step, phase=FORWARD):
    """Counts the operations of a forward pass in the given phase, and of a backward pass."""
    activity, record = Activity(), SimpleNamespace(total_samples=0)
    counter = FlopCount(module, activity, record)
    with counter:
        activity.enter(phase)
        output = step()
        activity.enter(BACKWARD)
        output.sum().backward()
        record.total_samples += 4
    return counter


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 3 * 3, 10)),
        nn.Sequential(nn.ConvTranspose2d(3, 8, 3).requires_grad_(False), nn.Conv2d(8, 2, 1)),
    ],
)
def test_passes_also_of_frozen_and_transposed_layers_are_counted_once_as_torch_counts_them(model):
    inputs = torch.rand(4, 3, 8, 8)
    with FlopCounterMode(display=False) as stock:
        model(inputs).sum().backward()
    assert count(model, lambda: model(inputs)).flops == stock.get_total_flops() > 0
    assert not any(layer._forward_hooks for layer in model.modules())  # none remains after the batch
    repeated = count(model, lambda: checkpoint(model, inputs, use_reentrant=False))
    assert repeated.flops == stock.get_total_flops()


def test_operations_are_counted_per_sample_and_only_in_the_passes():
    layer = nn.Linear(5, 7)
    assert count(layer, lambda: layer(torch.rand(4, 5))).per_sample == 2 * 2 * 5 * 7
    counter = count(layer, lambda: layer(torch.rand(4, 5)), phase=DATA)
    assert counter.flops == 0 and counter.per_sample is None


def test_compiled_modules_and_those_with_other_operations_are_not_counted():
    assert can_count(BoringModel())
    compiled, in_place, function = BoringModel(), BoringModel(), BoringModel()
    compiled.layer = torch.compile(compiled.layer, backend="eager")
    in_place.layer.compile(backend="eager")
    function.function = torch.compile(function.layer.forward, backend="eager")
    spectral_norm = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    others = [BoringModel() for _ in range(3)]
    for module, layer in zip(others, (nn.MultiheadAttention(8, 2), nn.LSTM(8, 8), spectral_norm), strict=True):
        module.other = layer
    assert [can_count(module) for module in (compiled, in_place, function, *others)] == [False] * 6
