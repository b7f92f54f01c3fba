"""Checks the training data, the processes that load it, and a few steps of the model without communication."""

import copy
import resource
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median, median_low
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import DataLoader

from rankzero.distributed.coordination.coordinator import Coordinator
from rankzero.distributed.devices import synchronize
from rankzero.distributed.monitoring.hangs import slow_ranks
from rankzero.distributed.process.system import usable_cores
from rankzero.distributed.world import World
from rankzero.preflight.check import CORRECT, FAIL, OK, WARN, Check, error_lines, failure, gather
from rankzero.sampling import generators
from rankzero.sampling.fingerprint import differences_between_ranks
from rankzero.sampling.plan import SamplingPlan
from rankzero.training.callbacks.safe_point import NoSignalConnector
from rankzero.training.lightning_inside import TunerExit

STEPS, SECONDS = 30, 1.0
"""A trial runs at least this many steps and seconds, unless its run is shorter or its steps are slow."""

SLOW_STEPS, SLOW_SECONDS = 4, 5.0
"""A trial with slow steps ends after this time, but has at least this many steps."""

MAX_STEPS = 10_000
"""A trial never has more steps, however fast they are."""

WARM_UP_STEPS = 2
"""Number of first steps that are not measured."""


class Trial:
    """A few steps of a model on one batch of its data, with a Trainer of Lightning.

    The model and the data cannot be used afterwards. They see the rank and the world size of the run. No step
    communicates, but a barrier in a hook that loads data waits for all ranks, if a process group exists.
    """

    def __init__(
        self, world: World, model: LightningModule, data: Any, plan: SamplingPlan, settings: Mapping[str, Any]
    ) -> None:
        self.world, self.model, self.data, self.plan = world, model, data, plan
        self.device = torch.device("cuda", world.index) if world.accelerator == "cuda" else torch.device("cpu")
        self._timer = _StepTimer(self.device)
        self._folder = TemporaryDirectory(prefix="rankzero-preflight-")
        self.trainer = Trainer(
            **settings,
            accelerator=world.accelerator,
            strategy=_OneRank("mps" if world.accelerator == "mps" else self.device, world),
            devices=1,
            limit_val_batches=0,
            logger=_NoLogger(self._folder.name),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[self._timer],
            plugins=[LightningEnvironment()],
        )
        self.trainer._signal_connector = NoSignalConnector()  # type: ignore[assignment]
        self.trainer.strategy.connect(model)
        model.trainer = self.trainer
        vars(model)["configure_callbacks"] = list  # a callback of the model might write checkpoints
        self._source: LightningModule | LightningDataModule | None = model if data is None else None
        """What provides the loaders; None if the user's script does."""
        if isinstance(data, LightningDataModule):
            self._source, data.trainer = data, self.trainer
            self.trainer.datamodule = data  # type: ignore[attr-defined]  # set by Lightning in `fit`

    def prepare_data(self) -> None:
        """Calls `prepare_data` on one rank, or on one rank of each machine, as Lightning does."""
        if self._source is None:
            return
        first_rank = self.trainer.local_rank if self._source.prepare_data_per_node else self.trainer.global_rank
        if first_rank == 0:
            self._source.prepare_data()

    def load_batch(self) -> dict[str, Any]:
        """Loads the first batch of this rank; `prepare_data` must be complete on all ranks.

        Returns the number of loader processes, the bytes of the batches that they may hold, and the data's fingerprint.
        """
        generators.seed(self.plan.seed)  # a run gives all ranks the same generators before it sets up the data
        loaders = self.data
        if self._source is not None:
            self._source.setup("fit")
            loaders = self._source.train_dataloader()
        wrapped: list[DataLoader[Any]] = []

        def wrap(loader: "DataLoader[Any]") -> object:
            wrapped.append(loader)
            return self.plan.wrap(loader, training=True)

        if isinstance(loaders, CombinedLoader):
            loaders.flattened = [apply_to_collection(loader, DataLoader, wrap) for loader in loaders.flattened]
            combined = loaders
        else:
            combined = CombinedLoader(apply_to_collection(loaders, DataLoader, wrap), "max_size_cycle")
        self._batch = next(iter(combined))[0]
        self._timer.max_steps, self._batches = STEPS, STEPS + 1
        with suppress(TypeError, NotImplementedError):  # an iterable data set has no length
            epochs = self.trainer.max_epochs or -1
            # More steps than in the run could exceed the length of a schedule of the learning rate.
            self._timer.max_steps = min(len(combined) * epochs, MAX_STEPS) if epochs > 0 else MAX_STEPS
            self._batches = max(self._timer.max_steps + 1, len(combined))
        sizes: list[int] = []
        apply_to_collection(self._batch, torch.Tensor, lambda tensor: sizes.append(tensor.nbytes))
        prefetched = sum(loader.num_workers * (loader.prefetch_factor or 0) for loader in wrapped)
        return {
            "workers": sum(loader.num_workers for loader in wrapped),
            "prefetched_bytes": prefetched * (sum(sizes) // max(1, len(wrapped))),
            "data": dict(self.plan.data),
        }

    def train(self) -> dict[str, Any]:
        """Trains on the loaded batch; returns the `seconds` of a step, and the `peak_bytes` of memory.

        `seconds` is the median, or None if this rank has no sample in the first batch.
        """
        loader = _Repeated(self._batch, self._batches)
        data: Any = loader
        if self._source is not None:
            # The hooks that load the data have been called. Its other hooks are called as in a run.
            source = copy.copy(self._source) if self._source is not self.model else self.model
            vars(source).update(dict.fromkeys(("prepare_data", "setup", "teardown"), lambda *_, **__: None))
            vars(source)["train_dataloader"] = lambda: loader
            data = source if source is not self.model else None
        if self._batch is None:
            return {"seconds": None, "peak_bytes": 0}
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM
        self._fit(data)
        seconds = self._timer.seconds[WARM_UP_STEPS:] or self._timer.seconds
        return {"seconds": median(seconds) if seconds else None, "peak_bytes": _peak_memory(self.device)}

    def _fit(self, data: Any) -> None:
        handler = signal.getsignal(signal.SIGINT)
        try:
            self.trainer.fit(self.model, data)
        except SystemExit:
            if not isinstance(self._timer.error, KeyboardInterrupt):
                raise
            signal.signal(signal.SIGINT, handler)  # Lightning ignores further interrupts, and exits
            raise KeyboardInterrupt from None


class _OneRank(SingleDeviceStrategy):
    """A strategy that knows its rank in the run, and communicates only to wait for or to copy from other ranks."""

    def __init__(self, device: Any, world: World) -> None:
        super().__init__(device)
        self.world_size, self.global_rank, self.local_rank = world.size, world.rank, world.local_rank

    @property
    def is_global_zero(self) -> bool:
        return bool(self.global_rank == 0)

    def barrier(self, *_: Any, **__: Any) -> None:
        if dist.is_initialized():
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        values = [obj]
        if dist.is_initialized():
            dist.broadcast_object_list(values, src)
        return values[0]

    def all_gather(self, tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Returns this rank's tensor in the shape of the tensors of all ranks."""
        return tensor if self.world_size == 1 else torch.stack([tensor] * self.world_size)


class _NoLogger(DummyLogger):
    """A logger that discards everything, and names a temporary folder."""

    save_dir = log_dir = property(lambda self: self._folder)

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder


class _Repeated:
    """A loader that returns copies of the same batch."""

    def __init__(self, batch: Any, count: int) -> None:
        self.batch, self.count = batch, count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        return (copy.deepcopy(self.batch) for _ in range(self.count))


class _StepTimer(Callback):
    """Measures each step, including the work of the device, and ends the trial before the end of the epoch."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: list[float] = []
        self.max_steps = STEPS
        self.error: BaseException | None = None
        self._started = 0.0

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.error = exception

    def on_train_batch_start(self, *_: Any) -> None:
        self._started = self._now()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.seconds.append(self._now() - self._started)
        steps, seconds = len(self.seconds), sum(self.seconds)
        is_measured = steps >= STEPS and seconds >= SECONDS
        is_slow = steps >= SLOW_STEPS and seconds >= SLOW_SECONDS
        if is_measured or is_slow or steps == self.max_steps or trainer.global_step == trainer.max_steps:
            raise TunerExit  # ends `fit` without the hooks of the end of an epoch

    def _now(self) -> float:
        synchronize(self.device)
        return time.perf_counter()


def _peak_memory(device: torch.device) -> int:
    """Returns the largest memory of the GPU, or of this process, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


SHARED_MEMORY = Path("/dev/shm")


def check_data(fingerprints: Sequence[Mapping[str, str]], errors: Mapping[int, str], hosts: Sequence[str]) -> Check:
    """Compares the training data of all ranks."""
    if errors:
        remedy = f"{CORRECT}; all hosts need the same data"
        return failure("data", "the training data cannot be read", errors, hosts, remedy)
    details = differences_between_ranks(fingerprints, hosts)
    values = {"ranks": list(fingerprints)}
    if details:
        advice = ["use the same files on all hosts; if a script generates the data at random, set a seed"]
        return Check("data", FAIL, "the training data differs between ranks", details, advice, values)
    samples = fingerprints[0].get("samples")
    summary = f"{samples} samples, the same on all ranks" if samples else "readable; the data set has no fingerprint"
    return Check("data", OK, summary, values=values)


def check_workers(coordinator: Coordinator, workers: int, prefetched_bytes: int) -> Check:
    """Compares the loader processes of each host with its cores and its shared memory. All ranks must call."""
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None
    own = {"workers": workers, "cores": sorted(usable_cores()), "shared_memory": free, "needed": prefetched_bytes}
    ranks: list[dict[str, Any]] = coordinator.decide(own, list)
    ranks_on: dict[str, list[dict[str, Any]]] = {}
    for host, values in zip(coordinator.world.hosts, ranks, strict=True):
        ranks_on.setdefault(host, []).append(values)
    details: list[str] = []
    advice: dict[str, None] = {}
    has_failed = False
    for host, local_ranks in ranks_on.items():
        count = sum(values["workers"] for values in local_ranks)
        cores = len({core for values in local_ranks for core in values["cores"]})
        if count > cores:
            details.append(f"{host} has {count} loader processes on {cores} core{'s' * (cores > 1)}")
            fair_share = max(1, cores // len(local_ranks))
            advice[f"--data.num_workers {fair_share}, or more cores per rank"] = None
        needed, free = sum(values["needed"] for values in local_ranks), local_ranks[0]["shared_memory"]
        if free is not None and needed > free:
            has_failed |= needed > 2 * free  # seldom are all batches in memory at the same time
            details.append(
                f"{SHARED_MEMORY} on {host} has {free / 1e6:,.0f} MB free, and the loader processes of this host need "
                f"up to {needed / 1e6:,.0f} MB"
            )
            size = 2 * needed // 2**30 + 1
            advice[f"docker run --shm-size={size}g or --ipc=host, or --data.num_workers N with a smaller N"] = None
    summary = f"{workers} loader process{'es' * (workers != 1)} per rank"
    status = FAIL if has_failed else WARN if details else OK
    return Check("loader processes", status, summary, details, list(advice), {"ranks": ranks})


def check_steps(coordinator: Coordinator, trial: Trial) -> Check:
    """Trains a few steps on every rank, without communication. All ranks must call."""
    name, hosts = "training steps", coordinator.world.hosts
    results, errors = gather(coordinator, trial.train)
    # torch's message for a collective without a process group
    if errors and all("process group has not been initialized" in text for text in errors.values()):
        summary = "not tried, because the model communicates by itself"
        return Check(name, WARN, summary, error_lines(errors, hosts), values={"errors": errors})
    if errors:
        is_memory = any("out of memory" in text.lower() or "OutOfMemory" in text for text in errors.values())
        smaller = "--batch_size N with a smaller N, or --max_device_batch_size N to accumulate gradients"
        return failure(name, "a step of the model fails", errors, hosts, smaller if is_memory else CORRECT)
    seconds = {rank: result["seconds"] for rank, result in enumerate(results) if result and result["seconds"]}
    if not seconds:
        return Check(name, WARN, "no rank has a sample in the first batch")
    slow, middle = slow_ranks(seconds), median_low(seconds.values())
    details = [
        f"rank {rank} on {hosts[rank]} takes {1e3 * value:,.1f} ms, {value / middle:.1f} times the median"
        for rank, value in ((rank, seconds[rank]) for rank in slow)
    ]
    alternative = ", or start the job without this host" if len(set(hosts)) > 1 else ""
    advice = [f"look for other programs on {hosts[rank]} (top, nvidia-smi){alternative}" for rank in slow[:4]]
    peak = max(result["peak_bytes"] for result in results if result)
    memory = f"{peak / 1e9:,.1f} GB of {'GPU memory' if trial.device.type == 'cuda' else 'memory, with all imports'}"
    summary = f"a step takes {1e3 * middle:,.1f} ms without communication, and at most {memory}"
    return Check(name, WARN if slow else OK, summary, details, advice, {"ranks": results})
