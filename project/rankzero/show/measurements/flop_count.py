"""Counts the floating-point operations of a training step."""

from typing import Any

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.flop_counter import conv_flop_count
from torch.utils.hooks import RemovableHandle

from rankzero.distributed.monitoring.activity import BACKWARD, DATA, Activity
from rankzero.distributed.torch_inside import is_compiled
from rankzero.training.metrics.step_log import IntervalRecord

CONVOLUTIONS = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d

COMPUTE_DTYPES = {
    "32-true": torch.float32,
    "64-true": torch.float64,
    **{f"bf16-{kind}": torch.bfloat16 for kind in ("mixed", "true")},
    **{f"16-{kind}": torch.float16 for kind in ("mixed", "true")},
}
"""Precision -> the dtype of its matrix products."""


class FlopCount:
    """Counts the operations of linear and convolutional layers in one batch, in the forward and the backward pass.

    Used as a context manager around the first batch of an attempt. It only observes the shapes of inputs and outputs;
    torch's `FlopCounterMode` counts all operators, but some operators and compiled functions fail or change under it.
    A forward pass that activation checkpointing repeats is not counted, as usual for the utilization of a device.
    Nothing is counted if a layer cannot be counted, because the total would be too small.
    """

    def __init__(self, module: LightningModule, activity: Activity, record: IntervalRecord) -> None:
        self._module, self._activity, self._record = module, activity, record
        self._handles: list[RemovableHandle] = []
        self.flops = self.samples = 0
        self._has_failed = False

    @property
    def per_sample(self) -> float | None:
        """Number of operations per sample; None if none were counted."""
        return self.flops / self.samples if self.flops and self.samples and not self._has_failed else None

    def __enter__(self) -> "FlopCount":
        self._samples_before = self._record.total_samples
        layers = [layer for layer in self._module.modules() if isinstance(layer, nn.Linear | CONVOLUTIONS)]
        self._handles = [layer.register_forward_hook(self._count) for layer in layers]
        return self

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self.samples = self._record.total_samples - self._samples_before

    def _count(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or self._activity.phase in (DATA, BACKWARD):
            return
        try:
            self.flops += _operations(layer, inputs[0], output)
        except Exception:  # an unusual layer: training continues
            self._has_failed = True


def _operations(layer: Any, inputs: Tensor, output: Tensor) -> int:
    """Returns the number of operations of a layer in the forward and the backward pass."""
    weight = layer.weight
    if isinstance(layer, nn.Linear):
        forward = 2 * output.numel() * layer.in_features
    else:
        if inputs.ndim != weight.ndim:
            raise ValueError("an input without a batch dimension")
        forward = conv_flop_count(list(inputs.shape), list(weight.shape), list(output.shape), layer.transposed)
    # The backward pass takes as many operations for the gradient of the weights, and for that of the inputs.
    return int(forward * (1 + int(weight.requires_grad) + int(inputs.requires_grad)))


def can_count(module: LightningModule) -> bool:
    """Whether the operations of a module can be counted.

    Hooks would trigger recompilation of compiled code. Parametrized layers, attention and recurrent layers perform
    operations that are not counted, so the total would be too small.
    """
    return getattr(module, "_compiler_ctx", None) is None and not any(
        isinstance(submodule, (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase))
        or is_parametrized(submodule)
        or is_compiled(submodule)
        for submodule in module.modules()
    )


def peak_flops_per_second(trainer: Trainer) -> float | None:
    """Returns the published peak of this rank's device in the precision of the run; None if Lightning has no figure."""
    try:
        return get_available_flops(trainer.strategy.root_device, COMPUTE_DTYPES[trainer.precision])
    except Exception:  # an unknown chip or precision
        return None
