"""Creates and destroys torch's process group, and sends a file through it."""

import io
import itertools
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

import torch

from rankzero.distributed.monitoring.monitor import InFlight
from rankzero.distributed.process.system import available_memory, variables
from rankzero.distributed.timers import TIMERS
from rankzero.distributed.torch_inside import HashStore, PrefixStore, Store, active_collectives
from rankzero.distributed.world import World

_numbers = itertools.count()
"""Numbers of the process groups, equal on all ranks. A later group must not find the keys of an earlier one."""

THREADS = Path("/proc/self/task")

CHUNK_BYTES = 16 << 20
"""Bytes that one collective sends of a file."""


def wait_for_gloo_threads() -> None:
    """Waits until no thread of gloo runs.

    A thread of gloo releases the tensors of a collective after the collective is complete, and takes a lock of the
    interpreter for it. If a process forks in this moment, as to start a loader worker, Python before 3.11.10 leaves the
    lock locked in the child, which then never runs (github.com/python/cpython/issues/112275). On a busy machine, 2 of
    33 runs on two ranks with loader workers waited forever.
    """
    end = time.monotonic() + TIMERS.slow_poll
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


_nccl_log: list[int] = []
"""Descriptor of the file in memory to which NCCL writes its warnings; empty without such a file."""


def _collected_warnings() -> AbstractContextManager[None]:
    """Makes NCCL write warnings to a file in memory, unless the user has set its variables."""
    if _nccl_log or "NCCL_DEBUG" in os.environ or "NCCL_DEBUG_FILE" in os.environ:
        return nullcontext()
    _nccl_log.append(os.memfd_create("nccl"))
    return variables(NCCL_DEBUG="WARN", NCCL_DEBUG_FILE=f"/proc/self/fd/{_nccl_log[0]}")


def new_warnings_of_nccl() -> str:
    """Returns the lines that NCCL has written since the last call."""
    return os.read(_nccl_log[0], 1 << 20).decode(errors="replace") if _nccl_log else ""


def disable_watchdog_of_nccl() -> None:
    """Makes the next process group leave it to the monitor to end a run, unless the user has decided otherwise.

    After an error, torch's watchdog would abort each process at once, rank zero possibly before it prints the cause.
    """
    user_set = os.environ.keys() & {"NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}
    if not user_set or ("TORCHELASTIC_RUN_ID" in os.environ and os.environ[user_set.pop()] == "1"):  # set by torchrun
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")  # nccl2 has no such variable


def init_process_group(
    store: Store | None, world: World, backend: str, device: torch.device, timeout: timedelta | None
) -> None:
    """Creates the process group. All ranks must call."""
    uses_nccl = backend == "nccl"
    if uses_nccl:  # records when a GPU begins a collective
        os.environ.setdefault("TORCH_NCCL_ENABLE_TIMING", "1")
    exception_hook = sys.excepthook  # torch wraps the hook, and delays its output until it returns
    with _collected_warnings() if uses_nccl else nullcontext():
        torch.distributed.init_process_group(
            backend,
            store=PrefixStore(f"process group {next(_numbers)}", store or HashStore()),
            rank=world.rank,
            world_size=world.size,
            timeout=timeout,
            device_id=device if uses_nccl else None,
        )
    sys.excepthook = exception_hook


def raising_nccl_errors() -> AbstractContextManager[None]:
    """Makes the process groups that are created meanwhile raise errors and timeouts of NCCL where they are waited for.

    Otherwise, torch's watchdog ends the process.
    """
    return variables(TORCH_NCCL_BLOCKING_WAIT="1")


_kept_groups: list[object] = []
"""NCCL's groups after an error."""


def destroy_process_group(after_error: bool) -> bool:
    """Destroys the process group; otherwise about one gloo run in ten dies of signal 6 after all work is done.

    Args:
        after_error: Whether this rank has failed. NCCL's group is then kept, until the process ends: destroying it may
            wait forever for other ranks.

    Returns:
        Whether no process group is left.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return True
    group = torch.distributed.group.WORLD
    if after_error and torch.distributed.get_backend() != "gloo":
        _kept_groups.append(group)
    if group in _kept_groups:
        return False
    torch.distributed.destroy_process_group()
    return True


def collective_in_flight(backend: str, device: torch.device) -> InFlight:
    """Returns the oldest collective that this process has begun and that has not completed, and whether the GPU works.

    Reads torch's flight recorder, which records the calls of each process group, here without Python stacks. Any thread
    may call this function. On a GPU, the recorder reads CUDA events: without a current device, a thread would create a
    second context, on GPU 0; and during the capture of a CUDA graph, the capture would fail.

    Raises:
        NotImplementedError: This version of torch does not record the collectives of the backend.
    """
    has_group = torch.distributed.is_available() and torch.distributed.is_initialized()
    uses_gpu = device.type == "cuda" and torch.cuda.is_initialized()
    if uses_gpu:
        torch.cuda.set_device(device)
        if _is_capturing():
            return InFlight()
    # Messages between two ranks are left out: before torch 2.15, those of a batch over NCCL never become complete.
    entries = active_collectives(backend) if has_group else []
    entry = next((entry for entry in entries if not entry["retired"] and not entry["is_p2p"]), None)
    if entry is None:
        return InFlight(awaits_gpu=uses_gpu and not torch.cuda.default_stream(device).query())
    is_queued, is_timed = entry["state"] == "scheduled", entry["profiling_name"].startswith("nccl:")
    if is_queued and is_timed and os.environ.get("TORCH_NCCL_ENABLE_TIMING") == "1":
        return InFlight(int(entry["collective_seq_id"]), awaits_gpu=True)
    name = entry["profiling_name"].partition(":")[2]
    count = sum(map(math.prod, entry["input_sizes"]))
    description = f"{name} of {count:,} value{'s' * (count != 1)}" if count else name
    # nccl2, the default of torch 2.15, records only that a collective was queued.
    kernel = " or for a kernel before it" * (is_queued and backend == "nccl")
    return InFlight(int(entry["collective_seq_id"]), f"{description}{kernel}")


def _is_capturing() -> bool:
    """Returns whether a CUDA graph is captured on the stream that `torch.cuda.graph` uses by default.

    Compiled models capture on another stream, in a mode that permits calls of other threads.
    """
    if (stream := torch.cuda.graph.default_capture_stream) is None:
        return False
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


def broadcast_file(
    open_file: Callable[[bool | None], tuple[BinaryIO, bool]], device: torch.device, local_ranks: int
) -> tuple[BinaryIO, bool]:
    """Reads a file on rank zero only; returns a file with the same content on every rank. All ranks must call.

    Each rank keeps the content in memory. If this takes more than half of the memory that is available to rank zero and
    the other processes of its machine, each rank opens the file itself.

    Args:
        open_file: Opens the file, and returns it with a value that all ranks receive. Its argument states whether to
            read the file into memory; None if it may choose.
        device: This rank's device, for the process group.
        local_ranks: The largest number of ranks on a machine.

    Raises:
        Exception: On all ranks, if `open_file` or reading raised it on rank zero.
    """
    header: list[Any] = [None]
    opened: tuple[BinaryIO, bool] | None = None
    content: bytearray | memoryview = bytearray()
    if torch.distributed.get_rank() == 0:
        try:
            opened = open_file(None)
            file, value = opened
            size = file.seek(0, io.SEEK_END)
            file.seek(0)
            if fits := size * local_ranks <= available_memory() // 2:
                content = _read(file, size)
            header = [(size, fits, value)]
        except Exception as error:
            header = [error]
    uses_nccl = torch.distributed.get_backend() == "nccl"
    torch.distributed.broadcast_object_list(header, src=0, device=device if uses_nccl else None)
    if isinstance(header[0], Exception):
        raise header[0]
    size, fits, value = header[0]
    if not fits:
        return opened or open_file(False)
    content = content or bytearray(size)
    for start in range(0, size, CHUNK_BYTES):
        part = torch.frombuffer(content, dtype=torch.uint8, offset=start, count=min(CHUNK_BYTES, size - start))
        sent = part.to(device) if uses_nccl else part
        torch.distributed.broadcast(sent, src=0)
        if sent is not part:
            part.copy_(sent)
    return io.BufferedReader(_MemoryFile(memoryview(content))), value


def _read(file: BinaryIO, size: int) -> bytearray | memoryview:
    """Returns the whole content of a file; of a file in memory, without a copy."""
    if isinstance(file, io.BytesIO):
        return file.getbuffer()
    content = bytearray(size)
    with file:
        if (count := file.readinto(content)) != size:  # type: ignore[attr-defined]
            raise OSError(f"only {count} of {size} bytes could be read")
    return content


class _MemoryFile(io.RawIOBase):
    """A file whose content is in memory. Unlike io.BytesIO, it copies nothing, and gloo may hold it at `close`."""

    def __init__(self, content: memoryview) -> None:
        super().__init__()
        self._content, self._position = content, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._content)}[whence]
        self._position = max(0, origin + offset)
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        part = self._content[self._position : self._position + len(buffer)]
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)
