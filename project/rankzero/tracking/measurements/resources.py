"""Measures the memory of this rank and the batches that its loader processes have prepared."""

import math
from typing import Any

import psutil
import torch
from lightning.pytorch import Trainer

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
    """Returns the number of batches that loader processes hold ready; NaN without loader processes (torch 2.15)."""
    combined = trainer.fit_loop._combined_loader
    iterators = [getattr(loader, "_iterator", None) for loader in (combined.flattened if combined else ())]
    queues: list[Any] = [iterator for iterator in iterators if hasattr(iterator, "_data_queue")]
    if not queues:
        return math.nan
    out_of_order = sum(len(info) == 2 for queue in queues for info in queue._task_info.values())
    return float(out_of_order + sum(queue._data_queue.qsize() for queue in queues))
