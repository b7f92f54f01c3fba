import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext
from functools import partial

import psutil
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from rankzero.distributed.process.stop_signals import STOP_SIGNALS
from rankzero.distributed.timers import TIMERS
from rankzero.sampling.batch_sampler import ElasticBatchSampler
from rankzero.sampling.loader import ManagedLoader, read_ahead
from rankzero.sampling.permutation import Indices
from rankzero.sampling.plan import SamplingPlan
from rankzero.sampling.seeded_dataset import SeededDataset
from rankzero.sampling.workers import PrepareWorker, end_workers, raise_if_worker_died
from running import REPOSITORY, SOURCES, train_in_process
from stock import SIZE, Loaders, Net, train


class Tagged(DataLoader):
    tag, count = "of the class", 0

    def __init__(self, *arguments, tag="given", **settings):
        super().__init__(*arguments, **settings)
        self.tag = tag

    def counted(self):
        self.count += 1
        return self.count, self.tag, len(self.dataset), self.num_workers


NAMES = ("batch_size", "drop_last", "num_workers", "pin_memory", "multiprocessing_context", "collate_fn")


class AttributeRecorder(BoringModel):
    """Model that records the attributes of its training loader."""

    def on_train_batch_start(self, batch, batch_idx):
        loader = self.trainer.train_dataloader
        attributes = [getattr(loader, name, "no such") for name in (*NAMES, "worker_init_fn", "missing")]
        kinds = isinstance(loader, DataLoader), isinstance(loader, Tagged), len(loader), len(loader.dataset)
        self.attributes = kinds, attributes, loader.counted() if isinstance(loader, Tagged) else None


@pytest.mark.parametrize("loader_class", [DataLoader, Tagged])
def test_a_module_sees_the_same_loader_attributes_as_in_stock_lightning(loader_class):
    def observe(with_rankzero):
        module, loader = AttributeRecorder(), loader_class(torch.rand(12, 32), batch_size=4, shuffle=True)
        plan = SamplingPlan() if with_rankzero else None
        train_in_process(model=module, data=loader, plan=plan, max_epochs=1, limit_val_batches=0)
        assert isinstance(module.trainer.train_dataloader, ManagedLoader) == with_rankzero
        return module.attributes, getattr(loader, "count", None)

    assert observe(True) == observe(False)


def test_a_loader_can_be_wrapped_again_after_training():
    plan, loader = SamplingPlan(), Tagged(TensorDataset(torch.arange(12.0)), batch_size=4, shuffle=True)
    wrapped = plan.wrap(loader, training=True)
    list(wrapped)
    wrapped_again = plan.wrap(wrapped, training=True)
    assert wrapped_again.user_loader is loader
    assert sorted(torch.cat([batch[0] for batch in wrapped_again]).tolist()) == list(range(12))


def test_a_batch_that_is_none_does_not_change_the_shares_of_other_batches():
    data = [torch.tensor(number) for number in range(10)]
    user_loader = DataLoader(data, 4, collate_fn=lambda samples: None if 0 in samples else torch.stack(samples))
    loader = ManagedLoader(user_loader, ElasticBatchSampler(10, 4), lambda value: value)
    assert [loader.next_share().samples for batch in loader if batch is not None] == [4, 2]


@pytest.fixture
def gpu(monkeypatch):
    """A pretended GPU, whose memory is the host's, and the calls that concern it, in order."""
    calls, streams = [], ["main"]

    class Stream:
        def __init__(self, device, name="copies"):
            self.name = name

        def wait_stream(self, other):
            calls.append(f"{self.name} waits for {other.name}")

    @contextmanager
    def enter(stream):
        streams.append(stream.name)
        yield
        streams.pop()

    def copy(tensor, device, non_blocking):
        calls.append(f"copy on {streams[-1]}, non_blocking={non_blocking}")
        return tensor.clone()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", enter)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(device, streams[-1]))
    # torch copies into memory of the same strides.
    pinned = lambda tensor: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: calls.append("pin") or pinned(tensor))
    monkeypatch.setattr(torch.Tensor, "to", copy)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, stream: calls.append(f"keep for {stream.name}"))
    return calls


def read_for_gpu(loader, copies=True, channels_last=False):
    managed = SamplingPlan().wrap(loader, training=True)
    managed.read_for(torch.device("cpu"), copies, channels_last)  # the device of the pretended GPU
    return managed


def test_a_batch_is_copied_on_a_stream_of_its_own_for_which_only_the_gpu_waits(gpu):
    loader = read_for_gpu(DataLoader(TensorDataset(torch.arange(6.0).view(3, 2), torch.arange(3)), batch_size=2))
    assert gpu == []
    batches = iter(loader)
    next(batches)
    assert gpu == [*["pin", "copy on copies, non_blocking=True", "keep for main"] * 2, "main waits for copies"]
    assert loader.next_share().samples == 2 and len(list(batches)) == 1 and len(gpu) == 14


def test_only_tensors_in_host_memory_and_in_plain_collections_are_copied(gpu):
    class Custom(tuple):
        pass

    sparse, mask = torch.ones(2, 2).to_sparse(), torch.tensor([[1.0], [2.0]]).expand(2, 3)
    batch = {"x": [torch.ones(2), "text"], "y": Custom([torch.ones(2)]), "z": (sparse,), "none": None}
    copied, copied_mask = read_for_gpu(DataLoader([batch, mask], collate_fn=lambda samples: samples[0]))
    assert gpu.count("pin") == 2 and copied["y"] is batch["y"] and copied["z"][0] is sparse
    assert type(copied["x"]) is list and torch.equal(copied["x"][0], torch.ones(2)) and copied["x"][1] == "text"
    assert torch.equal(copied_mask, mask)  # whose elements share memory


@pytest.mark.parametrize("channels_last", [True, False])
def test_images_are_copied_in_the_memory_layout_of_the_model(gpu, channels_last):
    images = torch.rand(2, 3, 4, 5)
    ((copied, labels),) = read_for_gpu(DataLoader(TensorDataset(images, torch.arange(2)), 2), True, channels_last)
    assert copied.is_contiguous(memory_format=torch.channels_last) == channels_last and labels.is_contiguous()
    assert torch.equal(copied, images)


def test_a_run_on_the_cpu_pins_no_memory_of_a_machine_with_a_gpu(gpu):
    loader = SamplingPlan().wrap(DataLoader(list(range(4)), pin_memory=True), training=True)
    assert len(list(loader)) == 4 and gpu == [] and not loader._reader.pin_memory and loader.pin_memory


@pytest.mark.parametrize(
    ("workers", "copies", "pins"), [(0, True, False), (0, False, True), (1, True, True), (1, False, True)]
)
def test_torch_pins_memory_only_for_loader_processes_and_for_batches_that_a_hook_transfers(gpu, workers, copies, pins):
    for pin_memory in (True, False):
        loader = read_for_gpu(DataLoader([0, 1], num_workers=workers, pin_memory=pin_memory), copies)
        assert loader._reader.pin_memory == (pins and pin_memory)


@pytest.mark.parametrize(("device", "reads"), [("cpu", [64, 64, 64]), ("meta", [64, 128])])  # "meta" stands for a GPU
def test_more_batches_are_read_at_once_on_a_gpu(device, reads):
    found = []

    class Images(Dataset):
        def __getitems__(self, indices):
            found.append(len(indices))
            return (torch.zeros(len(indices), 8192, device=device),)

    batches = list(read_ahead(SeededDataset(Images()), iter(torch.arange(192).view(3, 64).numpy()), 0))
    assert found == reads and [len(images) for (images,) in batches] == [64, 64, 64]


@pytest.mark.parametrize(
    ("fits", "settings", "is_on_device"),
    [(True, {}, True), (False, {}, False), (True, {"pin_memory": False}, False), (True, {"num_workers": 1}, False)],
)
def test_a_data_set_that_fits_on_the_gpu_is_read_there(gpu, fits, settings, is_on_device):
    class OnDevice(Dataset):
        __getitems__ = lambda self, indices: [torch.tensor(indices) + 100]  # noqa: E731

    class Data(Dataset):
        __len__ = lambda self: 4  # noqa: E731
        __getitem__ = lambda self, index: torch.tensor(index)  # noqa: E731
        on_device = lambda self, device: OnDevice() if fits else None  # noqa: E731

    class Wrapper(Dataset):
        __len__ = lambda self: 4  # noqa: E731

        def __getattr__(self, name):
            return getattr(Data(), name)

    assert isinstance(read_for_gpu(DataLoader(Wrapper(), pin_memory=True))._reader.dataset.dataset, Wrapper)
    loader = read_for_gpu(DataLoader(Data(), **{"pin_memory": True, **settings}, collate_fn=lambda batch: batch[0]))
    assert isinstance(loader.dataset, Data)
    assert isinstance(loader._reader.dataset.dataset, OnDevice) == is_on_device
    if "num_workers" not in settings:
        assert [int(batch) for batch in loader] == [index + 100 * is_on_device for index in range(4)]
        assert ("pin" in gpu) != is_on_device


def stop_iteration(*_):
    next(iter([]))


@pytest.mark.parametrize("source", ["collate function", "data set", "collate function of a stream"])
@pytest.mark.filterwarnings("ignore:.*decides the order of")
def test_a_stop_iteration_of_user_code_is_an_error_and_does_not_end_the_epoch(source):
    class Data(torch.utils.data.IterableDataset if "stream" in source else torch.utils.data.Dataset):
        __len__ = lambda self: 8  # noqa: E731
        __iter__ = lambda self: iter(range(8))  # noqa: E731
        __getitem__ = stop_iteration if source == "data set" else lambda self, index: index

    collate = stop_iteration if "collate" in source else None
    loader = SamplingPlan().wrap(DataLoader(Data(), 4, collate_fn=collate), training=True)
    with pytest.raises(RuntimeError, match=f"the {source.split(' of')[0]} raised StopIteration"):
        if source == "data set":  # in a loader process
            loader._reader.dataset.__getitems__(Indices([1]))
        list(loader)


class ProcessCounter(Callback):
    """Callback that records the number of loader processes."""

    def __init__(self, fails_in=None):
        self.counts, self.fails_in = [], fails_in
        for hook in ("train_epoch_start", "validation_epoch_start", "validation_epoch_end", "train_epoch_end"):
            setattr(self, f"on_{hook}", partial(self.record, hook))

    def record(self, hook, *arguments):
        self.counts.append((hook, len(living_children())))

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 1:
            self.record("second batch")
        if (trainer.current_epoch, batch_idx) == self.fails_in:
            raise ZeroDivisionError


def living_children():
    return [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]


def children_of(with_rankzero, persistent, fails_in):
    counter, settings = ProcessCounter(fails_in), {"persistent_workers": persistent}
    before = living_children()
    loaders = Loaders(num_workers=2, **settings), Loaders(2 * SIZE, num_workers=1, **settings)
    with pytest.raises(ZeroDivisionError) if fails_in else nullcontext():
        train(with_rankzero, Net(), [counter], *loaders, max_epochs=2, val_check_interval=0.5)
    del loaders
    remaining = [child for child in living_children() if child not in before]
    psutil.wait_procs(remaining, timeout=None if with_rankzero else 5)
    return [(hook, count - len(before)) for hook, count in counter.counts]


@pytest.mark.parametrize(("persistent", "fails_in"), [(False, None), (True, None), (False, (1, 2)), (True, (1, 2))])
def test_the_number_of_loader_processes_is_the_same_as_in_stock_lightning(persistent, fails_in):
    counts = children_of(True, persistent, fails_in)
    assert counts == children_of(False, persistent, fails_in) and max(count for _, count in counts) > 0


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
def test_processes_of_managed_and_unmanaged_loaders_ignore_stop_signals_and_call_the_users_function(tmp_path):
    settings = {"num_workers": 2, "worker_init_fn": lambda worker_id: (tmp_path / str(worker_id)).touch()}
    ignored = torch.cat(list(SamplingPlan().wrap(DataLoader(Handlers(), batch_size=2, **settings), training=True)))
    assert ignored.all() and ignored.shape == (4, len(STOP_SIGNALS))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
    loader, plan = DataLoader(Stream(), batch_size=1, num_workers=1), SamplingPlan()
    assert torch.cat(list(plan.wrap(plan.wrap(loader, training=True), training=True))).all()
    assert not isinstance(loader.worker_init_fn.init, PrepareWorker)


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
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}/tests:{SOURCES}", "OMP_NUM_THREADS": "1"}
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
