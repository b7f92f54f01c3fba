"""Creates torch's process group, on the store that the processes of a run share already, and destroys it."""

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
        store: Shared by all processes.
        launch: Rank of this process, and their number.
        backend: `nccl` or `gloo`.
        device: This process's.
        timeout: Of a collective; None for torch's.
    """
    hook = sys.excepthook  # torch would wrap it, and hold back what it prints until it returns
    torch.distributed.init_process_group(
        backend,
        store=PrefixStore("process group", store),
        rank=launch.rank or 0,
        world_size=launch.world_size,
        timeout=timeout,
        device_id=device if backend == "nccl" else None,
    )
    sys.excepthook = hook


def leave_process_group(after_error: bool) -> bool:
    """Destroys the process group; without this about one gloo run in ten ends with signal 6 after all is done.

    Args:
        after_error: Whether this rank has failed. NCCL's group then stays: it may wait for ranks that never come.

    Returns:
        Whether there is none any more.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return True
    if after_error and torch.distributed.get_backend() != "gloo":
        return False
    torch.distributed.destroy_process_group()
    return True
