import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.nn.utils import prune
from torch.optim import SGD

from rankzero.training.saved_state.parameter_groups import add_missing_groups, group_names


def net():
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))


HEAD = ["2.weight", "2.bias"]
BACKBONE = ["0.weight", "0.bias"]


def head_only(module, **settings):
    return SGD(module[2].parameters(), **{"lr": 0.1, "momentum": 0.9, **settings})


def names_of(module, optimizer):
    """Returns parameter names by identity, independently of the tested function."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def test_groups_list_known_unknown_shared_and_unusual_parameters_in_the_order_of_the_optimizer():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    module.register_parameter("scale_orig", nn.Parameter(torch.ones(1)))
    groups = [[*net()[2].parameters()], [module[1].weight, module[1].bias], [module.scale_orig], [module[0].bias]]
    optimizer = SGD([{"params": parameters} for parameters in groups], lr=0.1)
    assert group_names(module, optimizer) == [["", ""], ["0.weight", "1.bias"], ["scale_orig"], ["0.bias"]]


def test_pruned_parameter_has_the_same_name_as_without_pruning():
    module = net()
    optimizer = SGD(module.parameters(), lr=0.1)
    prune.l1_unstructured(module[0], "weight", 0.5)
    assert dict(module.named_parameters()).keys() >= {"0.weight_orig"}
    assert sorted(group_names(module, optimizer)[0]) == sorted([*BACKBONE, *HEAD])


def test_groups_that_lightnings_base_finetuning_added_are_added_and_their_saved_state_can_be_loaded():
    before = net()
    optimizer = head_only(before)
    BaseFinetuning.unfreeze_and_add_param_group(before[0], optimizer, lr=0.01)
    optimizer.param_groups[1]["weight_decay"] = 0.5
    before(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    after = net()
    resumed = head_only(after)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        resumed.load_state_dict(optimizer.state_dict())
    add_missing_groups(after, [resumed], [group_names(before, optimizer)])
    assert names_of(after, resumed) == names_of(before, optimizer) == [HEAD, BACKBONE]
    resumed.load_state_dict(optimizer.state_dict())
    assert (resumed.param_groups[1]["lr"], resumed.param_groups[1]["weight_decay"]) == (0.01, 0.5)
    for old, new in zip(before.parameters(), after.parameters(), strict=True):
        assert torch.equal(optimizer.state[old]["momentum_buffer"], resumed.state[new]["momentum_buffer"])


@pytest.mark.parametrize(
    "saved",
    [
        *([], [[]], [[HEAD]], [[["other"]]]),  # no group is missing
        *([[HEAD, []]], [[HEAD, [""]]], [[HEAD, ["0.weight", "other"]]]),  # the missing group is empty or unknown
    ],
)
def test_no_group_is_added_without_the_name_of_every_parameter(saved):
    module = net()
    optimizer = head_only(module)
    add_missing_groups(module, [optimizer], saved)
    assert names_of(module, optimizer) == [HEAD]


def test_each_optimizer_gets_its_own_groups_and_others_are_ignored():
    module = net()
    optimizers = [head_only(module), SGD([module[0].bias], lr=0.1)]
    add_missing_groups(module, optimizers, [[HEAD], [["0.bias"], ["0.weight"]], [BACKBONE]])
    assert [names_of(module, optimizer) for optimizer in optimizers] == [[HEAD], [["0.bias"], ["0.weight"]]]
    add_missing_groups(module, [], [[HEAD]])
