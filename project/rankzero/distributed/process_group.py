"""Creates torch's process group on the store that the processes of a run already share, and destroys it."""

import sys
from datetime import timedelta

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from rankzero.distributed.environments.launch import Launch


def init_process_group(
    store: Store, launch: Launch, backend: str, device: torch.device, timeout: timedelta | None
) -> None:
    """Creates the process group. All ranks must call.

    Args:
        store: The store that all processes share.
        launch: Rank of this process, and number of processes.
        backend: `nccl` or `gloo`.
        device: The device of this process.
        timeout: Time limit of a collective; None for torch's default.
    """
    exception_hook = sys.excepthook  # torch wraps the hook, and delays its output until it returns
    torch.distributed.init_process_group(
        backend,
        store=PrefixStore("process group", store),
        rank=launch.rank or 0,
        world_size=launch.world_size,
        timeout=timeout,
        device_id=device if backend == "nccl" else None,
    )
    sys.excepthook = exception_hook


def destroy_process_group(after_error: bool) -> bool:
    """Destroys the process group; otherwise about one gloo run in ten dies of signal 6 after all work is done.

    Args:
        after_error: Whether this rank has failed. NCCL's group is then kept: destroying it may wait forever for other
            ranks.

    Returns:
        Whether no process group is left.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return True
    if after_error and torch.distributed.get_backend() != "gloo":
        return False
    torch.distributed.destroy_process_group()
    return True
