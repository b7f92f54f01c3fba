import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from rankzero.distributed.monitoring.activity import BACKWARD, DATA, FORWARD, Activity
from rankzero.tracking.measurements.flop_count import FlopCount, can_count


class Record:
    total_samples = 0


def count(module, step, phase=FORWARD):
    """Counts the operations of a forward pass in the given phase, and of a backward pass."""
    activity, record = Activity(), Record()
    counter = FlopCount(module, activity, record)
    with counter:
        activity.enter(phase)
        output = step()
        activity.enter(BACKWARD)
        output.sum().backward()
        record.total_samples += 4
    return counter


def network():
    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 3 * 3, 10))


@pytest.mark.parametrize("is_frozen", [False, True])
def test_passes_of_frozen_and_transposed_layers_are_counted_as_torch_counts_them(is_frozen):
    model, inputs = network(), torch.rand(4, 3, 8, 8)
    if is_frozen:
        model = nn.Sequential(nn.ConvTranspose2d(3, 8, 3), nn.Conv2d(8, 2, 1))
        model[0].requires_grad_(False)
    with FlopCounterMode(display=False) as stock:
        model(inputs).sum().backward()
    assert count(model, lambda: model(inputs)).flops == stock.get_total_flops() > 0
    assert not any(layer._forward_hooks for layer in model.modules())  # none remains after the batch


def test_a_repeated_forward_pass_is_counted_once():
    model, inputs = network(), torch.rand(4, 3, 8, 8)
    repeated = count(model, lambda: checkpoint(model, inputs, use_reentrant=False))
    assert repeated.flops == count(model, lambda: model(inputs)).flops


def test_operations_are_counted_per_sample_and_only_in_the_passes():
    layer = nn.Linear(5, 7)
    assert count(layer, lambda: layer(torch.rand(4, 5))).per_sample == 2 * 2 * 5 * 7
    counter = count(layer, lambda: layer(torch.rand(4, 5)), phase=DATA)
    assert counter.flops == 0 and counter.per_sample is None


def test_a_compiled_module_is_not_counted():
    compiled, in_place, function = BoringModel(), BoringModel(), BoringModel()
    assert can_count(compiled)
    compiled.layer = torch.compile(compiled.layer, backend="eager")
    in_place.layer.compile(backend="eager")
    function.function = torch.compile(function.layer.forward, backend="eager")
    assert not can_count(compiled) and not can_count(in_place) and not can_count(function)


class Factorized(nn.Linear):
    """A linear layer without the attribute `weight`."""

    def __init__(self):
        super().__init__(32, 2)
        del self.weight
        self.left, self.right = nn.Parameter(torch.rand(2, 1)), nn.Parameter(torch.rand(1, 32))

    def forward(self, inputs):
        return inputs @ (self.left @ self.right).T


def test_an_unusual_layer_has_no_number_of_operations():
    layer = Factorized()
    assert count(layer, lambda: layer(torch.rand(4, 32))).per_sample is None


def test_counting_does_not_compute_the_weights_of_parametrized_layers_again():
    calls = []

    class Parametrization(nn.Module):
        def forward(self, weight):
            calls.append(1)
            return 2 * weight

    layer = nn.utils.parametrize.register_parametrization(nn.Linear(5, 7), "weight", Parametrization())
    calls.clear()
    assert count(layer, lambda: layer(torch.rand(4, 5))).per_sample is None
    assert len(calls) == 1


@pytest.mark.parametrize(
    "layer",
    [
        nn.MultiheadAttention(8, 2),
        nn.LSTM(8, 8),
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
    ],
)
def test_models_with_other_operations_are_not_counted(layer):
    module = BoringModel()
    module.other = layer
    assert not can_count(module)
