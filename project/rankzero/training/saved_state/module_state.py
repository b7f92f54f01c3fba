"""What callbacks change in modules and optimizers during training.

torch's pruning renames parameters and adds masks as buffers. `BaseFinetuning` adds parameter groups.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim import Optimizer


def pruned_parameters(module: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Returns the names of parameters that torch's pruning has masked -> `orig` (the unmasked values) and `mask`."""
    if not prune.is_pruned(module):
        return {}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return {
        name: {"orig": parameters[f"{name}_orig"].detach(), "mask": mask}
        for path, mask in module.named_buffers()
        if f"{(name := path.removesuffix('_mask'))}_orig" in parameters and name != path
    }


def without_pruning(state: Mapping[str, Any], pruned: Mapping[str, Any], masked: bool) -> dict[str, Any]:
    """Converts a pruned model's state dict to that of an unpruned model, since a new model has no masks yet.

    `pruned` is the result of `pruned_parameters`. With `masked`, the masks are multiplied into the parameters.
    """
    names = {f"{name}_{suffix}" for name in pruned for suffix in ("orig", "mask")}
    dense = {name: saved["orig"] * saved["mask"] if masked else saved["orig"] for name, saved in pruned.items()}
    return {**{name: value for name, value in state.items() if name not in names}, **dense}


def prune_again(module: nn.Module, pruned: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Applies masks to parameters, whose optimizer continues to update them, as with pruning during training."""
    for path, tensors in pruned.items():
        if path in pruned_parameters(module):
            continue
        owner, _, name = path.rpartition(".")
        if hasattr(submodule := module.get_submodule(owner), name):
            prune.custom_from_mask(submodule, name, tensors["mask"].to(getattr(submodule, name).device))


def group_names(module: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Returns the names of the parameters in each group, without the suffix that pruning adds."""
    names = {parameter: name.removesuffix("_orig") for name, parameter in module.named_parameters()}
    return [[names.get(parameter, "") for parameter in group["params"]] for group in optimizer.param_groups]


def add_missing_groups(module: nn.Module, optimizers: Sequence[Optimizer], saved: Sequence[Sequence[Any]]) -> None:
    """Adds the parameter groups that callbacks had added; their settings are loaded with the state of the optimizer.

    `saved` contains, for each optimizer and each of its groups, the names of the parameters.
    """
    parameters = dict(module.named_parameters())
    for optimizer, groups in zip(optimizers, saved, strict=False):
        for names in groups[len(optimizer.param_groups) :]:
            if all(name in parameters for name in names):
                optimizer.add_param_group({"params": [parameters[name] for name in names]})
