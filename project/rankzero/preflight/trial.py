"""Loads a batch and trains a few steps without communication, to test each rank and to measure its time and memory."""

import copy
import resource
import time
from collections.abc import Iterator
from itertools import repeat
from statistics import median_low
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import DataLoader

from rankzero.distributed.coordinator import Coordinator
from rankzero.distributed.devices import WorldInfo
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.monitoring.slow_ranks import slow_ranks
from rankzero.preflight.bandwidth import synchronize
from rankzero.preflight.check import FAIL, OK, WARN, Check, error_lines, gather
from rankzero.sampling.plan import SamplingPlan

MAX_STEPS, MIN_STEPS, MAX_SECONDS = 30, 3, 5.0
"""A trial ends after `MAX_STEPS`, or after `MAX_SECONDS` and `MIN_STEPS`."""


class Trial:
    """A few steps of a model on one batch of its data, with a Trainer of Lightning.

    The model and the data cannot be used afterwards. They see the rank and the world size of the run, but the Trainer
    does not communicate.

    Args:
        launch: The position of this process among all processes.
        world: The devices of all processes.
        model: The model.
        data: Its data module, training loaders, or None if the model has loaders of its own.
        plan: Batch sizes and seed; no loader has used this plan before.
        precision: Argument of the Trainer; None for its default.
    """

    def __init__(
        self,
        launch: Launch,
        world: WorldInfo,
        model: LightningModule,
        data: Any,
        plan: SamplingPlan,
        precision: Any,
    ) -> None:
        self.world, self.model, self.data, self.plan = world, model, data, plan
        self.device = (
            torch.device(world.accelerator, world.index) if world.accelerator == "cuda" else torch.device("cpu")
        )
        self._timer = _StepTimer(self.device)
        strategy = SingleDeviceStrategy(world.accelerator if world.accelerator == "mps" else self.device)
        strategy.world_size, strategy.global_rank = world.size, launch.rank or 0
        strategy.local_rank = launch.local_rank or 0
        self.trainer = Trainer(
            accelerator=world.accelerator,
            strategy=strategy,
            devices=1,
            precision=precision,
            max_steps=MAX_STEPS,
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[self._timer],
            plugins=[LightningEnvironment()],
        )
        self.trainer.strategy.connect(model)
        model.trainer = self.trainer
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

        Returns:
            `workers`: number of loader processes; `batch_bytes`: size of the batch; `data`: its data's fingerprint.
        """
        loaders = self.data
        if self._source is not None:
            self._source.setup("fit")
            loaders = self._source.train_dataloader()
        workers: list[int] = []

        def wrap(loader: "DataLoader[Any]") -> object:
            workers.append(loader.num_workers)
            return self.plan.wrap(loader, training=True)

        combined = CombinedLoader(apply_to_collection(loaders, DataLoader, wrap), "max_size_cycle")
        self._batch = next(iter(combined))[0]
        return {"workers": sum(workers), "batch_bytes": _bytes_of(self._batch), "data": dict(self.plan.data)}

    def train(self) -> dict[str, Any]:
        """Trains on the loaded batch; returns the `seconds` of the fastest step, and the `peak_bytes` of memory."""
        loader = _Repeated(self._batch, MAX_STEPS)
        data: Any = loader
        if self._source is not None:
            # The hooks that load the data have been called. Its other hooks are called as in a run.
            source = copy.copy(self._source) if self._source is not self.model else self.model
            vars(source).update(dict.fromkeys(("prepare_data", "setup", "teardown"), _do_nothing))
            vars(source)["train_dataloader"] = lambda: loader
            data = source if source is not self.model else None
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.trainer.fit(self.model, data)
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"seconds": min(self._timer.seconds), "peak_bytes": peak}


def check_steps(coordinator: Coordinator, trial: Trial) -> Check:
    """Trains a few steps on every rank, without communication. All ranks must call.

    Args:
        coordinator: Exchanges values between all ranks.
        trial: Has loaded its batch on all ranks.
    """
    hosts = coordinator.hosts
    results, errors = gather(coordinator, trial.train)
    if errors:
        is_memory = any("out of memory" in text.lower() or "OutOfMemory" in text for text in errors.values())
        remedy = "--batch_size N with a smaller N, or --max_device_batch_size N to accumulate gradients"
        advice = [remedy if is_memory else "correct the error in the model or its data that the check of steps names"]
        details = error_lines(errors, hosts)
        return Check("training steps", FAIL, "a step of the model fails", details, advice, {"errors": errors})
    seconds = {rank: result["seconds"] for rank, result in enumerate(results) if result}
    slow, median = slow_ranks(seconds), median_low(seconds.values())
    details = [
        f"rank {rank} on {hosts[rank]} takes {1e3 * seconds[rank]:,.1f} ms, "
        f"{seconds[rank] / median:.1f} times the median"
        for rank in slow
    ]
    alternative = ", or start the job without this host" if len(set(hosts)) > 1 else ""
    advice = [f"look for other programs on {hosts[rank]} (top, nvidia-smi){alternative}" for rank in slow[:4]]
    peak = max(result["peak_bytes"] for result in results if result)
    memory = f"{peak / 1e9:,.1f} GB of {'GPU memory' if trial.device.type == 'cuda' else 'memory, with all imports'}"
    summary = f"the fastest step takes {1e3 * median:,.1f} ms without communication, and at most {memory}"
    return Check("training steps", WARN if slow else OK, summary, details, advice, {"ranks": results})


class _Repeated:
    """A loader that returns the same batch several times."""

    def __init__(self, batch: Any, count: int) -> None:
        self.batch, self.count = batch, count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        return repeat(self.batch, self.count)


class _StepTimer(Callback):
    """Measures each step, including the work of the device, and ends the trial."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: list[float] = []
        self._started = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self._started = self._now()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.seconds.append(self._now() - self._started)
        trainer.should_stop = len(self.seconds) >= MIN_STEPS and sum(self.seconds) > MAX_SECONDS

    def _now(self) -> float:
        synchronize(self.device)
        return time.perf_counter()


def _do_nothing(*_: Any, **__: Any) -> None:
    """Replaces a hook that has already been called."""


def _bytes_of(batch: Any) -> int:
    """Returns the size of the tensors in a batch."""
    sizes: list[int] = []
    apply_to_collection(batch, torch.Tensor, lambda tensor: sizes.append(tensor.nbytes))
    return sum(sizes)
