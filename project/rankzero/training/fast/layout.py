"""What makes a step faster without another model or other data: `--fast yes`."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

CPU_FEATURES = {"avx512_bf16", "amx_bf16", "bf16"}
"""What Linux calls arithmetic in bfloat16: of Intel and AMD, of Intel alone, of Arm."""

CPUINFO = Path("/proc/cpuinfo")

ONEDNN_BLOCK = 16
"""Channels that oneDNN computes together with AVX-512; 8 with AVX2."""


def choose_precision(accelerator: str, bf16: bool, asked: object) -> tuple[Any, str]:
    """Chooses the precision that pays; `benchmarks/resnet_step.py` compares it with loops written by hand.

    `torch.compile` takes a minute at each start, and a few steps of a ResNet-18 on the CPU hardly gained by it: it is
    left out.

    Args:
        accelerator: `cuda`, `mps` or `cpu`.
        bf16: Whether all processes compute in bfloat16 without emulating it.
        asked: The precision that was asked for, which stays; None where none was.

    Returns:
        The precision, as the Trainer takes it, and the reason in words.
    """
    if asked is not None:
        return asked, f"precision {asked}, as asked"
    if bf16:
        return "bf16-mixed", f"bf16-mixed, which this {accelerator} computes in"
    return None, f"32 bits, since this {accelerator} would have to emulate bfloat16"


def apply_layout(model: nn.Module, accelerator: str) -> str:
    """Lays out the model's weights in the way that pays; what it computes of them follows.

    Returns:
        The layout and the reason, in words.
    """
    channels_last, words = choose_layout(model, accelerator)
    if channels_last:
        model.to(memory_format=torch.channels_last)
    return words


def choose_layout(model: nn.Module, accelerator: str) -> tuple[bool, str]:
    """Whether to use channels_last, and the layout in words.

    One layer that must not have it decides for the whole model, because each layer hands its layout to the next.
    """
    if any(is_lazy(parameter) for parameter in model.parameters()):
        return False, "the layout as it is, because of layers whose shapes are not known yet"
    if not any(isinstance(module, nn.Conv2d | nn.ConvTranspose2d) for module in model.modules()):
        return False, "the layout as it is, without 2D convolutions"
    if accelerator == "cpu" and (layer := layer_unsafe_in_channels_last(model)):
        return False, (
            f"the layout as it is, because oneDNN's gradient of {layer}, a strided 1x1 convolution of fewer than "
            f"{ONEDNN_BLOCK} channels, is wrong in channels_last"
        )
    return True, "channels_last, for its convolutions"


def layer_unsafe_in_channels_last(model: nn.Module) -> str | None:
    """The name of the first layer for whose weight gradient oneDNN writes beyond its workspace; None without any.

    These are strided 1x1 convolutions in channels_last with fewer input channels in a group than a block
    (uxlfoundation/oneDNN#6035, seen with oneDNN 3.13). The gradient is wrong then, or the heap is corrupted.
    A 1x1 weight outside a convolution module counts too, because its stride is not known.
    """
    for name, module in model.named_modules():
        if isinstance(module, _ConvNd):
            if _is_unsafe(module):
                return name or type(module).__name__
            continue
        for parameter_name, weight in module.named_parameters(recurse=False):
            if weight.dim() == 4 and weight.shape[2:] == (1, 1) and min(weight.shape[:2]) < ONEDNN_BLOCK:
                return f"{name}.{parameter_name}".lstrip(".")
    return None


def _is_unsafe(layer: _ConvNd) -> bool:
    """A transposed convolution is computed as the convolution from its output to its input."""
    channels = layer.out_channels if layer.transposed else layer.in_channels
    strided_1x1 = set(layer.kernel_size) == {1} and set(layer.stride) != {1}
    return len(layer.kernel_size) == 2 and strided_1x1 and channels // layer.groups < ONEDNN_BLOCK


def computes_in_bf16(accelerator: str) -> bool:
    """Whether this process's device computes in bfloat16, rather than emulate it."""
    if accelerator == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return accelerator == "cpu" and bool(CPU_FEATURES & _cpu_features()) and _onednn_computes_in_bf16()


def _onednn_computes_in_bf16() -> bool:
    """Whether oneDNN, which computes torch's convolutions and products, may use such instructions.

    `ONEDNN_MAX_CPU_ISA` and builds for older processors leave them out.
    """
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _cpu_features() -> set[str]:
    """What the kernel says that this machine's processors have; nothing where it is not Linux."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.is_file() else []
    return {word for line in lines if line.startswith(("flags", "Features")) for word in line.split()}
