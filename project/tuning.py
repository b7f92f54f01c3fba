"""What makes a step faster without another model or other data: `--fast yes`."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

CPU_FEATURES = {"avx512_bf16", "amx_bf16", "bf16"}
"""What Linux calls arithmetic in bfloat16: of Intel and AMD, of Intel alone, of Arm."""

CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Tuning:
    """What is chosen for a run.

    Args:
        channels_last: Whether pictures and convolutions are laid out with their channels next to one another.
        precision: Of `--precision`; None leaves it as it is.
        reasons: What was chosen and why, for a person.
    """

    channels_last: bool
    precision: str | None
    reasons: str

    def apply(self, model: nn.Module) -> None:
        """Lays out the model's weights; what it computes of them follows."""
        if self.channels_last:
            model.to(memory_format=torch.channels_last)


def choose(model: nn.Module, accelerator: str, bf16: bool, asked: object) -> Tuning:
    """Chooses what pays; `benchmarks/resnet_step.py` compares it with loops written by hand.

    `torch.compile` takes a minute at each start, and a few steps of a ResNet-18 on the CPU hardly gained by it: it is
    left out.

    Args:
        model: The model.
        accelerator: `cuda`, `mps` or `cpu`.
        bf16: Whether all processes compute in bfloat16 without emulating it.
        asked: The precision that was asked for, which stays; None where none was.
    """
    convolves = any(isinstance(module, nn.Conv2d | nn.ConvTranspose2d) for module in model.modules())
    layout = "channels_last, for its convolutions" if convolves else "the layout as it is, without 2D convolutions"
    if asked is not None:
        return Tuning(convolves, None, f"{layout}; precision {asked}, as asked")
    if bf16:
        return Tuning(convolves, "bf16-mixed", f"{layout}; bf16-mixed, which this {accelerator} computes in")
    return Tuning(convolves, None, f"{layout}; 32 bits, since this {accelerator} would have to emulate bfloat16")


def computes_in_bf16(accelerator: str) -> bool:
    """Whether this process's device computes in bfloat16, rather than emulate it."""
    if accelerator == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return accelerator == "cpu" and bool(CPU_FEATURES & _cpu_features())


def _cpu_features() -> set[str]:
    """What the kernel says that this machine's processors have; nothing where it is not Linux."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.is_file() else []
    return {word for line in lines if line.startswith(("flags", "Features")) for word in line.split()}
