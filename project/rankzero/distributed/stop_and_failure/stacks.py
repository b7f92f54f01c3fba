"""Where the threads of this process are: the user's line, a debugger, a compiler. Does not import torch."""

import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from rankzero.distributed.error_reporter import OWN_PACKAGES
from rankzero.messages import is_in_package

_STDLIB = sysconfig.get_path("stdlib")
_DEBUGGERS = ("/pdb.py", "/bdb.py", "/debugpy/", "/pydevd", "/ipdb/", "/pudb/")
_COMPILERS = ("/torch/_dynamo/", "/torch/_inductor/", "/torch/_functorch/", "/triton/")


def main_thread_frames() -> list[FrameType]:
    """Returns the frames of the main thread, innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return list(_outward(frame))


def user_position(frames: list[FrameType]) -> str:
    """Returns the innermost line of the user's code, such as `train.py:34 in training_step`; empty if there is none."""
    for frame in frames:
        file = frame.f_code.co_filename
        is_library = "site-packages" in file or file.startswith((_STDLIB, "<"))
        if not is_library and not is_in_package(Path(file), *OWN_PACKAGES):
            return f"{Path(file).name}:{frame.f_lineno} in {frame.f_code.co_name}"
    return ""


def is_in_debugger(frames: list[FrameType]) -> bool:
    """Whether a Python debugger has stopped the main thread, or another process traces this one (gdb, strace)."""
    return _any_file_contains(frames, _DEBUGGERS) or _tracer() != 0


def is_compiling(frames: list[FrameType]) -> bool:
    """Whether the main thread compiles a model (`torch.compile`), which may take minutes."""
    return _any_file_contains(frames, _COMPILERS)


def all_stacks() -> str:
    """Returns the Python stacks of all threads, the main thread first."""
    frames, main = sys._current_frames(), threading.main_thread().ident
    threads = sorted(threading.enumerate(), key=lambda thread: thread.ident != main)
    return "\n".join(
        f"thread {thread.name!r}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for thread in threads
        if thread.ident in frames
    )


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _any_file_contains(frames: list[FrameType], parts: tuple[str, ...]) -> bool:
    return any(part in frame.f_code.co_filename for frame in frames for part in parts)


def _tracer() -> int:
    """Returns the process id of the process that traces this one; 0 if there is none or on a system without `/proc`."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("TracerPid:")), 0)
