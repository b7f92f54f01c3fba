"""Stacks of the loader processes, written by a signal handler that needs no Python interpreter. Does not import torch.

A rank cannot read the stacks of another process. So each loader process lets faulthandler write them to a file in
memory when it receives `STACK_SIGNAL`, also if its interpreter is blocked. The rank reads the file through `/proc`.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import re
import signal
import sys
import time
from pathlib import Path

from rankzero.distributed.process.process_state import process_state
from rankzero.distributed.process.user_traceback import is_user_file
from rankzero.distributed.timers import TIMERS

_FILE_NAME = "rankzero-stacks"


def write_stacks_on_signal() -> None:
    """Makes this loader process write its stacks on `STACK_SIGNAL`; does nothing on systems other than Linux."""
    if sys.platform == "linux":
        faulthandler.register(_stack_signal(), os.memfd_create(_FILE_NAME), all_threads=True)


def worker_stacks() -> dict[int, str]:
    """Returns the stacks of each loader process of this rank, by process id; its state if it does not respond.

    The call lasts up to `TIMERS.worker` if a loader process does not respond.
    """
    pids = [child.pid for child in multiprocessing.active_children() if child.pid is not None]
    files = {pid: file for pid in pids if (file := _stack_file(pid))}
    sizes: dict[int, int] = {}
    for pid, file in files.items():
        with contextlib.suppress(OSError):  # the process has ended
            sizes[pid] = file.stat().st_size
            os.kill(pid, _stack_signal())
    stacks: dict[int, str] = {}
    deadline = time.monotonic() + TIMERS.worker
    while pending := sizes.keys() - stacks.keys():
        time.sleep(TIMERS.poll)
        is_last_round = time.monotonic() > deadline
        for pid in sorted(pending):
            text = ""
            with contextlib.suppress(OSError):
                text = files[pid].read_bytes()[sizes[pid] :].decode(errors="replace")
            if text.endswith("\n"):
                stacks[pid] = text
            elif is_last_round:
                state, _ = process_state(pid) or ("unknown", "")  # such as `D` while it waits for a disk, see proc(5)
                stacks[pid] = f"no response, process state {state}\n"
    return stacks


def worker_position() -> str:
    """Returns where a loader process of this rank is in the user's code, or that it does not respond; else empty."""
    for pid, text in worker_stacks().items():
        if text.startswith("no response"):
            return f"loader process {pid}: {text.strip()}"
        for file, line, function in re.findall(r'File "(.+)", line (\d+) in (.+)', text):
            if is_user_file(file):
                return f"loader process {pid}: {Path(file).name}:{line} in {function}"
    return ""


def _stack_signal() -> int:
    return int(signal.SIGRTMIN) + 7


def _stack_file(pid: int) -> Path | None:
    """Returns the path of the file to which a process writes its stacks; None if it has none."""
    try:
        descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
        return next((path for path in descriptors if _FILE_NAME in path.readlink().name), None)
    except OSError:
        return None
