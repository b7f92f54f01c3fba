import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.optim import SGD

from rankzero.training.saved_state import module_state
from stock import differences


def pruned_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 2)))


def pruned_net(method):
    module = pruned_layers()
    if method == "globally":
        prune.global_unstructured([(module[0], "weight"), (module[1][0], "weight")], prune.L1Unstructured, amount=0.4)
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


@pytest.mark.parametrize("method", ["once", "weight and bias", "twice", "globally"])
def test_state_without_masks_fits_a_new_model_which_pruned_again_computes_and_trains_as_before(method):
    module, resumed = pruned_net(method), pruned_layers()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
    saved, expected = module_state.pruned_parameters(module), state_without_masks(module, method)
    for state in (module.state_dict(), expected):  # masks stored separately, or multiplied into the parameters
        found, original = (module_state.without_pruning(state, saved, masked) for masked in (True, False))
        assert differences(dict(sorted(found.items())), expected) == []
        assert original.keys() == expected.keys()
        assert all(torch.equal(original[name], tensors["orig"]) for name, tensors in saved.items())
    pruned_layers().load_state_dict(found)
    resumed.load_state_dict(original)
    module_state.prune_again(resumed, saved)
    assert differences(*(dict(sorted(pruned.state_dict().items())) for pruned in (resumed, module))) == []
    for trained_module in (module, resumed):
        trained_module(torch.ones(2, 4)).sum().backward()
        torch.optim.SGD(trained_module.parameters(), lr=0.1).step()
    inputs = torch.ones(1, 4)
    assert torch.equal(module(inputs), resumed(inputs))
    assert differences(state_without_masks(resumed, method), state_without_masks(module, method)) == []


def test_each_optimizer_gets_its_own_groups_without_unknown_parameters():
    module, head = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), ["2.weight", "2.bias"]
    optimizers = [SGD(module[2].parameters(), lr=0.1), SGD([module[0].bias], lr=0.1)]
    saved = [[head, ["0.weight", "other"], [""]], [["0.bias"], ["0.weight"]], [["0.weight", "0.bias"]]]
    module_state.add_missing_groups(module, optimizers, saved)
    names = [module_state.group_names(module, optimizer) for optimizer in optimizers]
    assert names == [[head], [["0.bias"], ["0.weight"]]]
