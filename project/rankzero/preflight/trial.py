"""Loads a batch and trains a few steps without communication, to see whether each rank can and how long it takes."""

import copy
import resource
import time
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import DataLoader

from rankzero.distributed.devices import WorldInfo
from rankzero.distributed.environments.launch import Launch
from rankzero.sampling.plan import SamplingPlan

MAX_STEPS, MIN_STEPS, MAX_SECONDS = 30, 3, 5.0
"""A trial ends after `MAX_STEPS`, or after `MAX_SECONDS` and `MIN_STEPS`."""


class Trial:
    """A few steps of a model on one batch of its data, with a Trainer of Lightning. Uses up `model` and `data`.

    Model and data see the rank and the world size of the run, but the Trainer does not communicate.

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
        self._timer = _StepTimer()
        device = torch.device(world.accelerator, world.index) if world.accelerator == "cuda" else world.accelerator
        strategy = SingleDeviceStrategy(device)
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
        self._source = data if isinstance(data, LightningDataModule) else model
        if isinstance(data, LightningDataModule):
            data.trainer = self.trainer
            self.trainer.datamodule = data  # type: ignore[attr-defined]  # set by Lightning in `fit`

    def prepare_data(self) -> None:
        """Calls `prepare_data` on one rank, or on one rank of each machine, as Lightning does."""
        first_rank = self.trainer.local_rank if self._source.prepare_data_per_node else self.trainer.global_rank
        if first_rank == 0 and self._has_own_loaders:
            self._source.prepare_data()

    def load_batch(self) -> dict[str, Any]:
        """Loads the first batch of this rank; `prepare_data` must be complete on all ranks.

        Returns:
            `workers`: number of loader processes; `batch_bytes`: size of the batch; `data`: its data's fingerprint.
        """
        loaders = self.data
        if self._has_own_loaders:
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
        data: Any = _Repeated(self._batch, MAX_STEPS)
        if self._has_own_loaders:
            source = copy.copy(self._source) if self._source is self.data else self._source
            loader = data
            vars(source).update(dict.fromkeys(("prepare_data", "setup", "teardown"), _do_nothing))
            vars(source)["train_dataloader"] = lambda: loader
            data = source if source is not self.model else None
        if self.world.accelerator == "cuda":
            torch.cuda.reset_peak_memory_stats(self.world.index)
        if isinstance(data, LightningDataModule):
            self.trainer.fit(self.model, datamodule=data)
        else:
            self.trainer.fit(self.model, data)
        if self.world.accelerator == "cuda":
            peak = torch.cuda.max_memory_allocated(self.world.index)
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"seconds": min(self._timer.seconds), "peak_bytes": peak}

    @property
    def _has_own_loaders(self) -> bool:
        """Whether the data module or the model provides the loaders, and not the user's script."""
        return self.data is None or self._source is self.data


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

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._started = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self._started = _now()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.seconds.append(_now() - self._started)
        trainer.should_stop = len(self.seconds) >= MIN_STEPS and sum(self.seconds) > MAX_SECONDS


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _do_nothing(*_: Any, **__: Any) -> None:
    """Replaces a hook that has already been called."""


def _bytes_of(batch: Any) -> int:
    """Returns the size of the tensors in a batch."""
    sizes: list[int] = []
    apply_to_collection(batch, torch.Tensor, lambda tensor: sizes.append(tensor.nbytes))
    return sum(sizes)
