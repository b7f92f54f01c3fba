"""Groups of parameters that callbacks add to optimizers while a run trains, as `BaseFinetuning` does."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer


def group_names(module: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """The names of the parameters in each group, as they are without pruning."""
    buffers = dict(module.named_buffers())
    names = {}
    for name, parameter in module.named_parameters():
        unpruned = name.removesuffix("_orig")
        names[parameter] = unpruned if f"{unpruned}_mask" in buffers else name
    return [[names.get(parameter, "") for parameter in group["params"]] for group in optimizer.param_groups]


def add_missing_groups(module: nn.Module, optimizers: Sequence[Optimizer], saved: Sequence[Sequence[Any]]) -> None:
    """Adds the groups of parameters that callbacks had added to optimizers; their settings are loaded with the state.

    Args:
        module: Whose parameters they are.
        optimizers: As configured.
        saved: For each optimizer, and each of its groups, the names of the parameters.
    """
    parameters = dict(module.named_parameters())
    for optimizer, groups in zip(optimizers, saved, strict=False):
        for names in groups[len(optimizer.param_groups) :]:
            if names and all(name in parameters for name in names):
                optimizer.add_param_group({"params": [parameters[name] for name in names]})
