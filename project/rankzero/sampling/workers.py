"""Loader processes that the signals to stop a run do not reach: they go on reading until the last step is done.

Slurm sends a signal to every process of a step, a terminal to every process of its foreground group. A loader process
goes by its own handlers, torch's among them, and would leave.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

from rankzero.distributed.process.stop_signals import STOPPING


class IgnoreStopSignals:
    """The start of a loader process, a DataLoader's `worker_init_fn`.

    Args:
        init: The user's.
    """

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self.init = init

    def __call__(self, worker_id: int) -> None:
        if not _parent_lives():
            os._exit(1)
        for signum in STOPPING:
            signal.signal(signum, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
        if self.init:
            self.init(worker_id)


def _parent_lives() -> bool:
    """Whether the process that reads still exists.

    torch's own watchdog compares later parents with the first one that it finds, which is another already where the
    process was killed while it started this one; such a loader process would never end.
    """
    parent = multiprocessing.parent_process()
    try:
        return parent is None or psutil.Process(parent.pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@contextmanager
def blocked_signals() -> Iterator[None]:
    """Holds the signals back while loader processes are started, which then have them held back until they are deaf."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_workers() -> None:
    """Ends those that are left, as the last thing: being deaf they would not leave at Python's own SIGTERM."""
    left = [child for child in multiprocessing.active_children() if child.daemon]
    if left:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler takes it for an error
    for child in left:
        child.kill()
