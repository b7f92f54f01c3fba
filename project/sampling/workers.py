"""Loader processes that the signals to stop a run do not reach: they go on reading until the last step is done.

Slurm sends a signal to every process of a step, a terminal to every process of its foreground group. A loader process
goes by its own handlers, torch's among them, and would leave.
"""

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from project.signals import STOPPING


class DeafWorker:
    """The start of a loader process, a DataLoader's `worker_init_fn`.

    Args:
        init: The user's.
    """

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self.init = init

    def __call__(self, worker_id: int) -> None:
        for signum in STOPPING:
            signal.signal(signum, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
        if self.init:
            self.init(worker_id)


@contextmanager
def held_signals() -> Iterator[None]:
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
