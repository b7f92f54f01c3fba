"""Where the threads of this process and its loader processes are.

A rank cannot read the stacks of another process. So each loader process lets faulthandler write them to a file in
memory when it receives `_stack_signal()`, also if its interpreter is blocked. The rank reads the file through `/proc`.
"""

import faulthandler
import multiprocessing
import os
import re
import signal
import sys
import sysconfig
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType

from rankzero.distributed.process.system import process_state
from rankzero.distributed.process.user_traceback import is_user_file
from rankzero.distributed.timers import TIMERS

_PACKAGE = Path(__file__).parents[2]
_TRAINER_FILE = str(_PACKAGE / "trainer.py")
_STDLIB = sysconfig.get_paths()["stdlib"]
_DEBUGGERS = (*(f"{_STDLIB}/{name}." for name in ("bdb", "pdb", "code")), "/debugpy/", "/pydevd", "/pudb/")
_COMPILERS = (
    *("torch/_dynamo/convert_frame.", "torch/_inductor/compile_fx.", "torch/_inductor/async_compile."),
    *("torch/_functorch/aot_autograd.", "torch/utils/cpp_extension.", "/triton/compiler/"),
)
"""Parts of the paths of files that are on the stack only during a compilation."""
WAITING_FUNCTIONS = {
    str(_PACKAGE / "distributed" / "stop_and_failure" / "exchange.py"): "an exchange between all ranks",
    str(_PACKAGE / "distributed" / "coordination" / "process_group.py"): "the connection of the process group",
    str(_PACKAGE / "distributed" / "stop_and_failure" / "channel.py"): "the agreement on a stop",
    str(_PACKAGE / "distributed" / "stop_and_failure" / "agreement.py"): "an agreement of all ranks",
}
"""Maps files of Rankzero in which the main thread waits for other ranks to a description."""


def main_thread_frames() -> list[FrameType]:
    """Returns the frames of the main thread, innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return [outer for outer, _ in traceback.walk_stack(frame)] if frame else []


def current_user_position(frames: list[FrameType]) -> str:
    """Returns the innermost line of the user's code that training has called, such as `train.py:34 in training_step`.

    Returns an empty string if training has called none.
    """
    for frame in frames:
        file = frame.f_code.co_filename
        if file == _TRAINER_FILE:
            return ""
        if is_user_file(file):
            return f"{Path(file).name}:{frame.f_lineno} in {frame.f_code.co_name}"
    return ""


def waiting_function(frames: list[FrameType]) -> str:
    """Returns the function in which the main thread waits for other ranks outside torch's record; else an empty string.

    These are the functions of Rankzero that exchange objects, and those of `torch.distributed` that use only a store.
    """
    in_torch = ""
    for frame in frames:
        file = frame.f_code.co_filename
        if file in WAITING_FUNCTIONS:
            work = f" ({frame.f_locals['work']})" if "work" in frame.f_locals else ""  # of an exchange
            return WAITING_FUNCTIONS[file] + work
        if "torch/distributed/" in file:
            in_torch = in_torch or frame.f_code.co_name
        elif not file.startswith((_STDLIB, "<")):
            return in_torch
    return in_torch


def is_in_debugger(frames: list[FrameType]) -> bool:
    """Whether a Python debugger has stopped the main thread, or another process traces this one (strace)."""
    if _any_file_contains(frames, _DEBUGGERS):
        return True
    with suppress(OSError):  # a system without `/proc`
        return "TracerPid:\t0\n" not in Path("/proc/self/status").read_text(errors="replace")
    return False


def is_compiling(frames: list[FrameType]) -> bool:
    """Whether the main thread compiles a model (`torch.compile`) or an extension, which may take minutes."""
    return _any_file_contains(frames, _COMPILERS)


def main_thread_stack() -> str:
    """Returns the Python stack of the main thread."""
    frames = main_thread_frames()
    return "".join(traceback.format_stack(frames[0])) if frames else ""


def all_stacks() -> str:
    """Returns the Python stacks of all threads, the main thread first."""
    frames, main = sys._current_frames(), threading.main_thread().ident
    return "\n".join(
        f"thread {thread.name!r}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for thread in sorted(threading.enumerate(), key=lambda thread: thread.ident != main)
        if thread.ident in frames
    )


def _any_file_contains(frames: list[FrameType], parts: tuple[str, ...]) -> bool:
    return any(part in frame.f_code.co_filename for frame in frames for part in parts)


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
        with suppress(OSError):  # the process has ended
            sizes[pid] = file.stat().st_size
            os.kill(pid, _stack_signal())
    stacks: dict[int, str] = {}
    deadline = time.monotonic() + TIMERS.worker
    while pending := sizes.keys() - stacks.keys():
        time.sleep(TIMERS.poll)
        is_last_round = time.monotonic() > deadline
        for pid in sorted(pending):
            text = ""
            with suppress(OSError):
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
