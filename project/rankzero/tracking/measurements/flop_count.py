"""Counts the floating-point operations of a training step."""

from typing import Any

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks.throughput_monitor import _plugin_to_compute_dtype
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils.flop_counter import conv_flop_count
from torch.utils.hooks import RemovableHandle

from rankzero.distributed.monitoring.activity import BACKWARD, DATA, Activity
from rankzero.training.metrics.interval_record import IntervalRecord


class FlopCount:
    """Counts the operations of linear and convolutional layers in one batch, in the forward and the backward pass.

    Used as a context manager around the first batch of an attempt. It only observes the shapes of inputs and outputs;
    torch's `FlopCounterMode` counts all operators, but some operators and compiled functions fail or change under it.
    A forward pass that activation checkpointing repeats is not counted, as usual for the utilization of a device.

    Args:
        module: The module, which is not compiled.
        activity: The phase of the main thread.
        record: The samples of the current logging interval.

    Attributes:
        flops: Number of operations on this rank.
        samples: Number of samples on this rank.
    """

    def __init__(self, module: LightningModule, activity: Activity, record: IntervalRecord) -> None:
        self._module, self._activity, self._record = module, activity, record
        self._handles: list[RemovableHandle] = []
        self.flops = self.samples = 0

    @property
    def per_sample(self) -> float | None:
        """Number of operations per sample; None if none were counted."""
        return self.flops / self.samples if self.flops and self.samples else None

    def __enter__(self) -> "FlopCount":
        self._samples_before = self._record.total_samples
        layers = [layer for layer in self._module.modules() if isinstance(layer, nn.Linear | _ConvNd)]
        self._handles = [layer.register_forward_hook(self._count) for layer in layers]
        return self

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self.samples = self._record.total_samples - self._samples_before

    def _count(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        inputs_are_tensors = inputs and isinstance(inputs[0], Tensor) and isinstance(output, Tensor)
        if not inputs_are_tensors or self._activity.phase in (DATA, BACKWARD):
            return
        if isinstance(layer, nn.Linear):
            forward = 2 * output.numel() * layer.in_features
        else:
            assert isinstance(layer, _ConvNd)
            weight = layer.weight.shape
            forward = conv_flop_count(list(inputs[0].shape), list(weight), list(output.shape), layer.transposed)
        # The backward pass takes as many operations for the gradient of the weights, and for that of the inputs.
        self.flops += forward * (1 + int(layer.weight.requires_grad) + int(inputs[0].requires_grad))


def can_count(module: LightningModule) -> bool:
    """Whether operations can be counted; hooks would make compiled modules compile again."""
    return getattr(module, "_compiler_ctx", None) is None and not any(
        isinstance(submodule, torch._dynamo.OptimizedModule) or submodule._compiled_call_impl is not None
        for submodule in module.modules()
    )


def peak_flops_per_second(trainer: Trainer) -> float | None:
    """Returns the published peak of this rank's device in the precision of the run; None if Lightning has no figure."""
    try:
        return get_available_flops(trainer.strategy.root_device, _plugin_to_compute_dtype(trainer.precision_plugin))
    except Exception:  # an unknown chip or precision
        return None
