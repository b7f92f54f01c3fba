import multiprocessing
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from rankzero.distributed.process.stop_signals import STOP_SIGNALS
from rankzero.distributed.timers import TIMERS
from rankzero.sampling.plan import SamplingPlan
from rankzero.sampling.workers import PrepareWorker, end_workers, raise_if_worker_died
from running import REPOSITORY, SOURCES


class Handlers(Dataset):
    """Data set that sends every stop signal to its process and returns whether the process ignores the signals."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        for signum in STOP_SIGNALS:
            os.kill(os.getpid(), signum)
        return torch.tensor([signal.getsignal(signum) == signal.SIG_IGN for signum in STOP_SIGNALS])


class Stream(IterableDataset):
    def __iter__(self):
        return iter([Handlers()[0]])


@pytest.mark.filterwarnings("ignore:.*decides the order of the training samples")
def test_processes_of_managed_and_unmanaged_loaders_ignore_stop_signals():
    loader = DataLoader(Handlers(), batch_size=2, num_workers=1)
    ignored = torch.cat(list(SamplingPlan().wrap(loader, training=True)))
    assert ignored.all() and ignored.shape == (4, 4)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
    loader, plan = DataLoader(Stream(), batch_size=1, num_workers=1), SamplingPlan()
    assert torch.cat(list(plan.wrap(plan.wrap(loader, training=True), training=True))).all()
    assert not isinstance(loader.worker_init_fn.init, PrepareWorker)


def test_a_users_worker_init_fn_is_still_called():
    worker_ids = []
    loader = DataLoader(Handlers(), worker_init_fn=worker_ids.append, num_workers=1)
    worker = SamplingPlan().wrap(loader, training=True)._reader.worker_init_fn
    handlers = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    try:
        worker(3)
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    assert worker_ids == [3] and worker.init == worker_ids.append


def ignore_signals():
    PrepareWorker(None)(0)
    time.sleep(60)


def test_end_workers_kills_the_remaining_loader_processes():
    handler = signal.getsignal(signal.SIGCHLD)
    process = multiprocessing.get_context("fork").Process(target=ignore_signals, daemon=True)
    process.start()
    try:
        end_workers()
        process.join(10)
        assert process.exitcode == -signal.SIGKILL
    finally:
        signal.signal(signal.SIGCHLD, handler)


ORPHAN = """
import multiprocessing, os, pathlib
from rankzero.sampling.workers import PrepareWorker

def read(parent):
    while os.getppid() == parent:
        pass
    PrepareWorker(None)(0)
    pathlib.Path("alive").touch()

process = multiprocessing.get_context("fork").Process(target=read, args=(os.getpid(),))
process.start()
print(process.pid, flush=True)
os._exit(0)
"""


def test_a_loader_process_without_a_parent_exits_at_once(cwd):
    environment = {**os.environ, "PYTHONPATH": SOURCES}
    command = [sys.executable, "-c", ORPHAN]
    result = subprocess.run(command, env=environment, cwd=cwd, check=True, stdout=subprocess.PIPE, text=True)
    while psutil.pid_exists(pid := int(result.stdout)) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert not (cwd / "alive").exists()


ENDS = """
from lightning.pytorch import Callback
from stock import Loaders, Net, train

class Ends(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.current_epoch == 1 and batch_idx == 2:
            trainer.should_stop = True
            if module.raises:
                raise ZeroDivisionError

kept = []
for persistent in (False, True):
    for raises in (False, True):
        module = Net()
        module.raises = raises
        try:
            train(True, module, [Ends()], Loaders(num_workers=2, persistent_workers=persistent))
        except ZeroDivisionError as error:
            kept.append(error)  # with its traceback, and all that its frames refer to
"""


@pytest.mark.system
def test_a_process_exits_although_its_loader_processes_ignore_signals():
    folder = REPOSITORY / "tests"
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{SOURCES}", "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-c", ENDS], env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "can only test a child process" not in result.stderr


class Reader:
    """Stands for an iterator of a DataLoader with one loader process."""

    def __init__(self, seconds):
        self._workers = [multiprocessing.get_context("fork").Process(target=time.sleep, args=(seconds,))]
        self._workers[0].start()


def test_only_a_loader_process_that_exits_after_its_connection_broke_is_named(monkeypatch):
    exits, cause = Reader(0.3), ConnectionResetError()
    with pytest.raises(RuntimeError, match=rf"pid\(s\) {exits._workers[0].pid}\) exited unexpectedly") as raised:
        raise_if_worker_died(exits, cause)
    assert raised.value.__cause__ is cause
    monkeypatch.setattr(TIMERS, "worker", 10_000)
    raise_if_worker_died(iter([]), EOFError())  # without loader processes, it does not wait
    monkeypatch.setattr(TIMERS, "worker", 0.1)
    lives = Reader(60)
    try:
        raise_if_worker_died(lives, ConnectionResetError())
    finally:
        lives._workers[0].kill()
        lives._workers[0].join()
