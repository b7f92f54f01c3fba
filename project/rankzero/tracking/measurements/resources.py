"""Measures the memory of this rank and the batches that its loader processes have prepared."""

import math

import psutil
import torch
from lightning.pytorch import Trainer

from rankzero.sampling.loader import ManagedLoader

GIB = 2**30


def memory_in_use(device: torch.device) -> dict[str, float]:
    """Returns the memory of this process in GiB, by tag; NaN for what does not exist.

    Args:
        device: Device of this rank. Its memory is the largest amount in use since the start.
    """
    on_device = torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else math.nan
    on_host = psutil.Process().memory_info().rss / GIB
    return {"workload/device_memory_gib": on_device, "workload/host_memory_gib": on_host}


def prepared_batches(trainer: Trainer) -> float:
    """Returns the number of batches that this rank's loader processes hold ready; NaN without loader processes."""
    combined = trainer.fit_loop._combined_loader
    loaders = combined.flattened if combined is not None else []
    counts = [loader.prepared_batches for loader in loaders if isinstance(loader, ManagedLoader)]
    known = [count for count in counts if count is not None]
    return float(sum(known)) if known else math.nan
