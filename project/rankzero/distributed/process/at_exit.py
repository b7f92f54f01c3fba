"""Ends a command without the teardown of torch's modules, which takes seconds.

Everything that the program has registered to run at its end has run before, because `import rankzero` registers this
module's exit function before libraries register theirs.
"""

import atexit
import ctypes
import gc
import io
import os
import sys
from contextlib import suppress

_EXIT = os._exit

_ENDED_IN_C = ("mpi4py.MPI", "h5py", "tables", "netCDF4")
"""Modules whose libraries do work at the end of a process, after Python: they close files, or leave MPI."""

_INJECTED = ("LD_PRELOAD", "CUDA_INJECTION64_PATH")
"""Variables that load further such libraries, for example those of profilers."""

_codes: list[int] = []


def install() -> None:
    """Registers the exit function, unless other code has registered one before, which would not run any more.

    Before a teardown, frozen objects are released: libraries count the remaining objects then, and print warnings.
    """
    is_first = atexit._ncallbacks() == 0
    atexit.register(gc.unfreeze)
    if is_first:
        atexit.register(_skip_teardown)


def exit_quickly_with(code: int) -> int:
    """Makes this program, which is about to exit with `code`, skip the teardown; returns `code`.

    Only for programs that consist of one of Rankzero's commands.
    """
    _codes.append(code)
    return code


def _skip_teardown() -> None:
    """Finalizes the objects that the command has left, flushes open files, and exits."""
    is_kept_open = sys.flags.interactive or sys.flags.inspect or hasattr(sys, "ps1")
    works_at_end = any(name in sys.modules for name in _ENDED_IN_C) or any(name in os.environ for name in _INJECTED)
    if not _codes or "torch" not in sys.modules or is_kept_open or works_at_end:
        return
    gc.collect()
    files = [item for item in gc.get_objects() if issubclass(type(item), io.IOBase.__mro__[1])]
    for file in [*files, sys.stdout, sys.stderr]:
        with suppress(Exception):  # closed, or its reader has ended
            file.flush()
    ctypes.CDLL(None).fflush(None)
    _EXIT(_codes[-1])
