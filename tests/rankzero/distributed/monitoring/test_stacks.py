import os
import signal
import sys
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from rankzero.distributed.monitoring.stacks import worker_position, worker_stacks
from rankzero.sampling.workers import PrepareWorker

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the stacks are read through /proc")


class Sleepy(Dataset):
    """A data set whose second sample takes very long."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        if index:
            time.sleep(1000)
        return torch.zeros(1)


@pytest.fixture
def pid():
    """The id of a loader process that does not return a sample."""
    loader = iter(DataLoader(Sleepy(), batch_size=1, num_workers=1, worker_init_fn=PrepareWorker(None)))
    next(loader)
    yield loader._workers[0].pid
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises an error
    for worker in loader._workers:
        worker.kill()
        worker.join()
    signal.signal(signal.SIGCHLD, handler)


def test_a_loader_process_that_does_not_respond_is_named_with_its_state(pid, scale_timers):
    scale_timers(0.2)
    os.kill(pid, signal.SIGSTOP)
    assert worker_position() == f"loader process {pid}: no response, process state T"


def test_without_loader_processes_there_is_no_position():
    assert worker_stacks() == {} and worker_position() == ""
