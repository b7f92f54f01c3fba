"""Precision, kernels and memory layout with which `--fast yes` speeds up a step, for the same model and data."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from rankzero.distributed.coordination.coordinator import Coordinator
from rankzero.distributed.devices import computes_in_bf16

ONEDNN_BLOCK = 16
"""Number of channels that oneDNN processes together with AVX-512; it is 8 with AVX2."""


def agree_on_precision(coordinator: Coordinator, accelerator: str, requested: object) -> tuple[Any, str]:
    """Returns the fastest precision for all ranks, as the Trainer's argument, and the reason. All ranks must call.

    `benchmarks/resnet_step.py` compares the result with hand-written loops. `torch.compile` is not used: it takes a
    minute at each start, and hardly sped up a few steps of a ResNet-18 on the CPU.
    """
    supports_bf16 = coordinator.decide(computes_in_bf16(accelerator), all)
    if requested is not None:
        return requested, f"precision {requested}, as requested"
    if supports_bf16:
        return "bf16-mixed", f"bf16-mixed, which this {accelerator} supports"
    return None, f"32 bits, because this {accelerator} would emulate bfloat16"


def use_fast_kernels(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Lets CUDA multiply matrices of 32 bits in TF32, and cuDNN measure its kernels if a run need not be deterministic.

    Takes Lightning's arguments of the Trainer, and returns them with `benchmark`.
    """
    if torch.get_float32_matmul_precision() == "highest":
        torch.set_float32_matmul_precision("high")
    if settings.get("benchmark") is not None:
        return dict(settings)
    is_deterministic = torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic
    return {**settings, "benchmark": not (is_deterministic or settings.get("deterministic"))}


def apply_layout(model: nn.Module, accelerator: str) -> str:
    """Converts the weights to the fastest memory layout, as of the activations; returns it and the reason as text.

    One layer that must not use channels_last rules it out for the whole model, because each layer passes its layout on
    to the next.
    """
    if any(is_lazy(parameter) for parameter in model.parameters()):
        return "unchanged memory layout, because some layers have no shapes yet"
    if not any(isinstance(module, nn.Conv2d | nn.ConvTranspose2d) for module in model.modules()):
        return "unchanged memory layout, because the model has no 2D convolution"
    if accelerator == "cpu" and (layer := layer_unsafe_in_channels_last(model)):
        return (
            f"unchanged memory layout, because oneDNN's gradient of {layer}, a strided 1x1 convolution of fewer than "
            f"{ONEDNN_BLOCK} channels, is wrong in channels_last"
        )
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dim() == 4:  # `Module.to` refuses a model that also has weights of five dimensions
            tensor.data = tensor.data.to(memory_format=torch.channels_last)
    return "channels_last memory layout"


def layer_unsafe_in_channels_last(model: nn.Module) -> str | None:
    """Returns the name of the first layer for whose weight gradient oneDNN writes beyond its workspace, or None.

    Affected are strided 1x1 convolutions in channels_last with fewer input channels per group than `ONEDNN_BLOCK`
    (uxlfoundation/oneDNN#6035, seen with oneDNN 3.13). The gradient is wrong, or the heap is corrupted.
    A 1x1 weight outside a convolution module counts as unsafe, because its stride is unknown.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            # oneDNN computes a transposed convolution as the convolution from its output to its input.
            channels = module.out_channels if module.transposed else module.in_channels
            is_strided_1x1 = set(module.kernel_size) == {1} and set(module.stride) != {1}
            if is_strided_1x1 and channels // module.groups < ONEDNN_BLOCK:
                return name or type(module).__name__
            continue
        for parameter_name, weight in module.named_parameters(recurse=False):
            if weight.dim() == 4 and weight.shape[2:] == (1, 1) and min(weight.shape[:2]) < ONEDNN_BLOCK:
                return f"{name}.{parameter_name}".lstrip(".")
    return None
