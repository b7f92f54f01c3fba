"""Creates torch's process group on the store that the processes of a run already share, and destroys it."""

import itertools
import json
import math
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from rankzero.distributed.environments.launch import Launch

_numbers = itertools.count()
"""Numbers of the process groups, equal on all ranks. A later group must not find the keys of an earlier one."""

THREADS = Path("/proc/self/task")

THREAD_WAIT_SECONDS = 0.5
"""Time limit of the wait for gloo's threads before a fork."""


def wait_for_gloo_threads() -> None:
    """Waits until no thread of gloo runs.

    A thread of gloo releases the tensors of a collective after the collective is complete, and takes a lock of the
    interpreter for it. If a process forks in this moment, as to start a loader worker, Python before 3.11.10 leaves the
    lock locked in the child, which then never runs (github.com/python/cpython/issues/112275). On a busy machine, 2 of
    33 runs on two ranks with loader workers waited forever.
    """
    end = time.monotonic() + THREAD_WAIT_SECONDS
    while any(map(_runs_gloo, THREADS.glob("*/stat"))) and time.monotonic() < end:
        time.sleep(0.0005)


def _runs_gloo(stat: Path) -> bool:
    """Whether a thread is one of gloo's and runs or waits for a processor; other waits do not hold the lock."""
    try:
        _, _, text = stat.read_text().partition("(")
    except OSError:  # the thread has ended
        return False
    name, _, state = text.rpartition(") ")
    return name.startswith("pt_gloo_runloop") and state.startswith("R")


if sys.version_info < (3, 11, 10):
    os.register_at_fork(before=wait_for_gloo_threads)


def init_process_group(
    store: Store | None, launch: Launch, backend: str, device: torch.device, timeout: timedelta | None
) -> None:
    """Creates the process group. All ranks must call.

    Args:
        store: The store that all processes share; None for a group of one process.
        launch: Rank of this process, and number of processes.
        backend: `nccl` or `gloo`.
        device: The device of this process.
        timeout: Time limit of a collective; None for torch's default.
    """
    exception_hook = sys.excepthook  # torch wraps the hook, and delays its output until it returns
    torch.distributed.init_process_group(
        backend,
        store=PrefixStore(f"process group {next(_numbers)}", store or HashStore()),
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


def collective_in_flight(backend: str) -> tuple[int, str] | None:
    """Returns the oldest collective that this process has begun and that has not completed; None if there is none.

    Reads torch's flight recorder, which records the calls of each process group, here without Python stacks. Any thread
    may call this function.

    Args:
        backend: `nccl` or `gloo`.

    Returns:
        The number of the collective among those of its process group, from 1, and its description, such as
        `all_reduce of 11,173,962 values`.

    Raises:
        NotImplementedError: This version of torch does not record the collectives of the backend.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    module: Any = torch._C._distributed_c10d
    try:
        if backend == "gloo":
            record = module._dump_fr_trace_json(onlyActive=True, backend="gloo")  # since torch 2.15
        else:
            record = module._dump_nccl_trace_json(onlyActive=True)
    except (AttributeError, RuntimeError, TypeError) as error:
        raise NotImplementedError(f"torch {torch.__version__} does not record the collectives of {backend}") from error
    collectives = [entry for entry in json.loads(record).get("entries", []) if not entry["retired"]]
    if not collectives:
        return None
    name = collectives[0]["profiling_name"].removeprefix(f"{backend}:")
    count = sum(map(math.prod, collectives[0]["input_sizes"]))
    description = f"{name} of {count:,} value{'s' * (count != 1)}" if count else name
    return int(collectives[0]["collective_seq_id"]), description
