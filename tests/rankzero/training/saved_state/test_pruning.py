import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning
from torch import nn
from torch.nn.utils import prune

from rankzero.training.saved_state import pruning
from rankzero.training.saved_state.pruning import prune_again, pruned_parameters, without_pruning
from stock import differences


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 2)))


METHODS = ("once", "weight and bias", "twice", "globally")


def pruned_net(method):
    module = net()
    if method == "globally":
        layers = [(module[0], "weight"), (module[1][0], "weight")]
        prune.global_unstructured(layers, prune.L1Unstructured, amount=0.4)
        return module
    prune.l1_unstructured(module[0], "weight", 0.5)
    if method == "twice":
        prune.ln_structured(module[0], "weight", 1, n=2, dim=0)
    elif method == "weight and bias":
        prune.random_unstructured(module[0], "bias", 1)
        prune.identity(module[1][0], "weight")
    return module


def state_without_masks(module, method):
    """Returns the state dict, sorted by name, after torch has made the masks permanent."""
    state, module = module.state_dict(), pruned_net(method)
    module.load_state_dict(state)
    for layer in (module[0], module[1][0]):
        for name in ("weight", "bias"):
            if hasattr(layer, f"{name}_mask"):
                prune.remove(layer, name)
    return dict(sorted(module.state_dict().items()))


def test_a_module_without_masks_has_no_pruned_parameters_and_a_parameter_that_no_longer_exists_is_not_pruned():
    module = net()
    assert pruned_parameters(module) == {}
    assert without_pruning(module.state_dict(), {}, masked=True).keys() == module.state_dict().keys()
    for saved in ({}, {"0.other": {"orig": torch.ones(2), "mask": torch.ones(2)}}):
        prune_again(module, saved)
        assert not prune.is_pruned(module)


@pytest.mark.parametrize("method", METHODS)
def test_pruned_parameters_are_those_that_have_masks_in_the_state_dict(method):
    module = pruned_net(method)
    state = module.state_dict()
    found = pruned_parameters(module)
    assert {*found} == {name.removesuffix("_mask") for name in state if name.endswith("_mask")}
    for name, tensors in found.items():
        assert differences([tensors["orig"], tensors["mask"]], [state[f"{name}_orig"], state[f"{name}_mask"]]) == []
        assert not tensors["orig"].requires_grad


def test_pruned_parameter_of_the_root_module_has_no_prefix():
    layer, other_layer = nn.Linear(2, 2), nn.Linear(2, 2)
    prune.identity(layer, "bias")
    prune_again(other_layer, pruned_parameters(layer))
    assert [*pruned_parameters(layer)] == [*pruned_parameters(other_layer)] == ["bias"]


@pytest.mark.parametrize("method", METHODS)
def test_state_without_masks_fits_a_new_model(method):
    module = pruned_net(method)
    expected = state_without_masks(module, method)
    for state in (module.state_dict(), expected):  # masks stored separately, or multiplied into the parameters
        found = without_pruning(state, pruned_parameters(module), masked=True)
        assert differences(dict(sorted(found.items())), expected) == []
        net().load_state_dict(found)
        original = without_pruning(state, pruned_parameters(module), masked=False)
        assert original.keys() == expected.keys()
        assert all(torch.equal(original[name], tensors["orig"]) for name, tensors in pruned_parameters(module).items())


@pytest.mark.parametrize("method", METHODS)
def test_model_that_is_pruned_again_computes_and_trains_as_before(method):
    module, resumed = pruned_net(method), net()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
    saved = pruned_parameters(module)
    resumed.load_state_dict(without_pruning(module.state_dict(), saved, masked=False))
    prune_again(resumed, saved)
    assert differences(*(dict(sorted(pruned.state_dict().items())) for pruned in (resumed, module))) == []
    for trained_module in (module, resumed):
        trained_module(torch.ones(2, 4)).sum().backward()
        torch.optim.SGD(trained_module.parameters(), lr=0.1).step()
    inputs = torch.ones(1, 4)
    assert torch.equal(module(inputs), resumed(inputs))
    assert differences(state_without_masks(resumed, method), state_without_masks(module, method)) == []


def set_up_callback(module, lottery=True):
    """Returns Lightning's pruning callback after its setup."""
    callback = ModelPruning("l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=lottery)
    callback.setup(None, module, "fit")
    return callback


def test_lottery_tickets_are_in_use_only_after_lightning_restores_initial_parameters():
    without_lottery, callback = set_up_callback(net(), lottery=False), set_up_callback(net())
    assert pruning.tickets_in_use(without_lottery) == []
    pruning.use_tickets(without_lottery, [0, 1])
    assert pruning.tickets_in_use(callback) == []
    callback.apply_pruning(0.3)
    assert pruning.tickets_in_use(callback) == []
    for _ in range(2):
        callback.apply_lottery_ticket_hypothesis()
        assert sorted(pruning.tickets_in_use(callback)) == [0, 1, 2, 3]


def test_lottery_tickets_are_in_use_again_after_a_resume():
    """A step then also changes the copies, as in an uninterrupted run."""
    module = net()
    callback = set_up_callback(module)
    callback.apply_pruning(0.3)
    pruning.use_tickets(callback, [0, 2])
    assert pruning.tickets_in_use(callback) == [0, 2]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(7)
    copies = {
        number: getattr(layer["data"], name)
        for layer in callback._original_layers.values()
        for number, name in layer["names"]
    }
    assert {number for number, copy in copies.items() if (copy == 7).all()} == {0, 2} and len(copies) == 4
    pruning.use_tickets(callback, [])
    assert pruning.tickets_in_use(callback) == [0, 2]
