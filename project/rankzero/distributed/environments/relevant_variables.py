"""The environment variables that should be equal on all ranks. Does not import torch."""

import os
from collections.abc import Mapping

PREFIXES = ("NCCL_", "GLOO_", "OMP_", "CUDA_", "TORCH_", "MKL_", "KMP_", "PYTORCH_")

VARIES_BY_RANK = (
    *("CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS"),
    *("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "NCCL_DEBUG_FILE", "CUDA_MPS_"),
)
"""Variables that may differ between ranks, or beginnings of their names: launchers and Rankzero set them per rank."""


def relevant_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the variables that change how ranks compute or communicate, and that should be equal on all ranks."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(PREFIXES) and not name.startswith(VARIES_BY_RANK)
    }
