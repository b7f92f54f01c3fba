"""Parameter groups that callbacks such as `BaseFinetuning` add to optimizers during training."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer


def group_names(module: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Returns the names of the parameters in each group, without the suffix that pruning adds."""
    names = {parameter: name.removesuffix("_orig") for name, parameter in module.named_parameters()}
    return [[names.get(parameter, "") for parameter in group["params"]] for group in optimizer.param_groups]


def add_missing_groups(module: nn.Module, optimizers: Sequence[Optimizer], saved: Sequence[Sequence[Any]]) -> None:
    """Adds the parameter groups that callbacks had added; their settings are loaded with the state of the optimizer."""
    parameters = dict(module.named_parameters())
    for optimizer, groups in zip(optimizers, saved, strict=False):
        for names in groups[len(optimizer.param_groups) :]:
            if all(name in parameters for name in names):
                optimizer.add_param_group({"params": [parameters[name] for name in names]})
