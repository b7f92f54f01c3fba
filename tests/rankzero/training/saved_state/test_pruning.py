"""Saved and restored pruning, compared with the results of torch's own pruning functions."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning
from torch import nn
from torch.nn.utils import prune

from rankzero.training.saved_state.pruning import (
    prune_again,
    pruned_parameters,
    tickets_in_use,
    use_tickets,
    without_pruning,
)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 2)))


def once(module):
    prune.l1_unstructured(module[0], "weight", 0.5)


def weight_and_bias(module):
    once(module)
    prune.random_unstructured(module[0], "bias", 1)
    prune.identity(module[1][0], "weight")


def twice(module):
    once(module)
    prune.ln_structured(module[0], "weight", 1, n=2, dim=0)


def globally(module):
    layers = [(module[0], "weight"), (module[1][0], "weight")]
    prune.global_unstructured(layers, prune.L1Unstructured, amount=0.4)


WAYS = [once, weight_and_bias, twice, globally]


def pruned(way):
    module = net()
    way(module)
    return module


def permanent(module, way):
    """Returns the state dict, sorted by name, after torch has made the masks permanent."""
    state, module = module.state_dict(), pruned(way)
    module.load_state_dict(state)
    for layer in (module[0], module[1][0]):
        for name in ("weight", "bias"):
            if hasattr(layer, f"{name}_mask"):
                prune.remove(layer, name)
    return dict(sorted(module.state_dict().items()))


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_module_without_masks_has_no_pruned_parameters():
    module = net()
    assert pruned_parameters(module) == {}
    assert without_pruning(module.state_dict(), {}, masked=True).keys() == module.state_dict().keys()
    prune_again(module, {})
    assert not prune.is_pruned(module)


@pytest.mark.parametrize("way", WAYS)
def test_pruned_parameters_are_those_that_have_masks_in_the_state_dict(way):
    module = pruned(way)
    state = module.state_dict()
    found = pruned_parameters(module)
    assert {*found} == {name.removesuffix("_mask") for name in state if name.endswith("_mask")}
    for name, part in found.items():
        assert torch.equal(part["orig"], state[f"{name}_orig"]) and torch.equal(part["mask"], state[f"{name}_mask"])
        assert not part["orig"].requires_grad


def test_pruned_parameter_of_the_root_module_has_no_prefix():
    layer = nn.Linear(2, 2)
    prune.identity(layer, "bias")
    assert list(pruned_parameters(layer)) == ["bias"]
    other = nn.Linear(2, 2)
    prune_again(other, pruned_parameters(layer))
    assert list(pruned_parameters(other)) == ["bias"]


@pytest.mark.parametrize("way", WAYS)
def test_state_without_masks_fits_a_new_model(way):
    module = pruned(way)
    expected = permanent(module, way)
    for state in (module.state_dict(), expected):  # masks stored separately, or multiplied into the parameters
        found = without_pruning(state, pruned_parameters(module), masked=True)
        assert same(found, {name: expected[name] for name in found}) and found.keys() == expected.keys()
        net().load_state_dict(found)
        original = without_pruning(state, pruned_parameters(module), masked=False)
        assert original.keys() == expected.keys()
        assert all(torch.equal(original[name], part["orig"]) for name, part in pruned_parameters(module).items())


@pytest.mark.parametrize("way", WAYS)
def test_model_that_is_pruned_again_computes_and_trains_as_before(way):
    module, resumed = pruned(way), net()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
    saved = pruned_parameters(module)
    resumed.load_state_dict(without_pruning(module.state_dict(), saved, masked=False))
    prune_again(resumed, saved)
    assert same(dict(sorted(resumed.state_dict().items())), dict(sorted(module.state_dict().items())))
    for one in (module, resumed):
        one(torch.ones(2, 4)).sum().backward()
        torch.optim.SGD(one.parameters(), lr=0.1).step()
    inputs = torch.ones(1, 4)
    assert torch.equal(module(inputs), resumed(inputs))
    assert same(permanent(resumed, way), permanent(module, way))


def test_a_parameter_that_no_longer_exists_is_not_pruned():
    module = net()
    prune_again(module, {"0.other": {"orig": torch.ones(2), "mask": torch.ones(2)}})
    assert not prune.is_pruned(module)


def callback_of(module, lottery=True):
    """Returns Lightning's pruning callback after its setup."""
    callback = ModelPruning("l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=lottery)
    callback.setup(None, module, "fit")
    return callback


def test_lottery_tickets_are_in_use_after_lightning_restores_initial_parameters():
    module = net()
    callback = callback_of(module)
    assert tickets_in_use(callback) == []
    callback.apply_pruning(0.3)
    assert tickets_in_use(callback) == []
    for _ in range(2):
        callback.apply_lottery_ticket_hypothesis()
        assert sorted(tickets_in_use(callback)) == [0, 1, 2, 3]


def test_lottery_tickets_are_in_use_again_after_a_resume():
    """A step then also changes the copies, as in an uninterrupted run."""
    module = net()
    callback = callback_of(module)
    callback.apply_pruning(0.3)
    use_tickets(callback, [0, 2])
    assert tickets_in_use(callback) == [0, 2]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(7)
    copies = [
        getattr(layer["data"], name) for layer in callback._original_layers.values() for _, name in layer["names"]
    ]
    numbers = [number for layer in callback._original_layers.values() for number, _ in layer["names"]]
    assert [bool((copy == 7).all()) for copy in copies] == [number in (0, 2) for number in numbers]
    use_tickets(callback, [])
    assert tickets_in_use(callback) == [0, 2]


def test_no_tickets_are_in_use_without_the_lottery_ticket_hypothesis():
    callback = callback_of(net(), lottery=False)
    assert tickets_in_use(callback) == []
    use_tickets(callback, [0, 1])
