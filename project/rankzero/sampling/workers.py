"""Prepares loader processes: they ignore stop signals, and write their stacks when a hang is reported.

They ignore stop signals so that they continue to read until the last step is done.

Slurm sends a signal to every process of a step, a terminal to every process of its foreground group. With its usual
handlers, which include torch's, a loader process would exit.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection

import psutil

from rankzero.distributed.monitoring.stacks import write_stacks_on_signal
from rankzero.distributed.process.stop_signals import STOP_SIGNALS
from rankzero.distributed.timers import TIMERS


class PrepareWorker:
    """The `worker_init_fn` of a DataLoader that prepares its loader processes."""

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self.init = init

    def __call__(self, worker_id: int) -> None:
        if not _is_parent_alive():
            os._exit(1)
        for signum in STOP_SIGNALS:
            signal.signal(signum, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        write_stacks_on_signal()
        if self.init:
            self.init(worker_id)


def _is_parent_alive() -> bool:
    """Returns whether the process that started this loader process still exists.

    torch's ManagerWatchdog compares the parent's id with the id that it found at its start. If the parent was killed
    before, that is the id of another process, and the loader process would never exit.
    """
    parent = multiprocessing.parent_process()
    try:
        return parent is None or psutil.Process(parent.pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def raise_if_worker_died(reader: object, error: Exception) -> None:
    """Raises a RuntimeError that names the loader process, if one died while a batch was fetched from it.

    torch (2.15) does so only if the process has already exited when the connection to it breaks.
    """
    workers = getattr(reader, "_workers", ())
    exiting = connection.wait([worker.sentinel for worker in workers], TIMERS.worker if workers else 0)
    for worker in workers:
        if worker.sentinel in exiting:
            worker.join()  # a process closes its sentinel shortly before `is_alive` reports its exit
            raise RuntimeError(f"DataLoader worker (pid(s) {worker.pid}) exited unexpectedly") from error


@contextmanager
def blocked_signals() -> Iterator[None]:
    """Blocks stop signals while loader processes start; each inherits the block until it ignores the signals."""
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def end_workers() -> None:
    """Kills the remaining loader processes at program exit, because they ignore the SIGTERM that Python sends."""
    remaining = [child for child in multiprocessing.active_children() if child.daemon]
    if remaining:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler reports killed loader processes as an error
    for child in remaining:
        child.kill()
