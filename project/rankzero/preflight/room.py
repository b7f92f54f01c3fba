"""Checks cores, shared memory and memory, the latter by trying a few steps of the model."""

import copy
import resource
import shutil
import time
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.environments import LightningEnvironment

from rankzero.distributed.coordinator import Coordinator
from rankzero.distributed.devices import WorldInfo
from rankzero.distributed.monitoring.slow_ranks import SLOW_FACTOR, slow_ranks
from rankzero.distributed.process.cores import usable_cores
from rankzero.preflight.check import FAIL, OK, WARN, Check, gather

TRIED_STEPS = 5

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108


def check_workers(coordinator: Coordinator, workers: int, batch_bytes: int) -> Check:
    """Compares loader processes with cores, and the batches that they hold with shared memory. All ranks must call.

    Args:
        coordinator: Exchanges values between all ranks.
        workers: Loader processes of this rank.
        batch_bytes: Size of a batch.
    """
    hosts = [member.host for member in coordinator.members]
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None
    own = {"workers": workers, "cores": len(usable_cores()), "shared_memory": free, "needed": 2 * workers * batch_bytes}
    ranks: list[dict[str, Any]] = coordinator.all_gather_object(own)
    details, advice = [], []
    crowded = [rank for rank, values in enumerate(ranks) if values["workers"] > values["cores"]]
    if crowded:
        rank = crowded[0]
        details.append(
            f"rank {rank} on {hosts[rank]} has {ranks[rank]['workers']} loader processes on {ranks[rank]['cores']} cores"
        )
        advice.append(f"num_workers={max(1, ranks[rank]['cores'] - 1)}, or more cores per rank")
    small = [
        rank
        for rank, values in enumerate(ranks)
        if values["shared_memory"] is not None and values["needed"] > values["shared_memory"]
    ]
    if small:
        rank = small[0]
        details.append(
            f"{SHARED_MEMORY} on {hosts[rank]} has {ranks[rank]['shared_memory'] / 1e6:,.0f} MB, and the loader "
            f"processes need {ranks[rank]['needed'] / 1e6:,.0f} MB"
        )
        advice.append("docker run --shm-size=8g or --ipc=host, or fewer loader processes")
    summary = f"{workers} loader processes and {own['cores']} cores per rank"
    status = FAIL if small else WARN if crowded else OK
    return Check("loader processes", status, summary, tuple(details), tuple(advice), {"ranks": ranks})


def check_step(coordinator: Coordinator, world: WorldInfo, model: LightningModule, batch: Any, settings: Any) -> Check:
    """Tries a few steps of a copy of the model on every rank, without communication. All ranks must call.

    Args:
        coordinator: Exchanges values between all ranks.
        world: The device of this process.
        model: The model, which is not changed.
        batch: A batch of this rank.
        settings: Further arguments of the Trainer, such as `precision`.
    """
    hosts = [member.host for member in coordinator.members]
    results, errors = gather(coordinator, lambda: try_steps(world, model, batch, settings))
    if errors:
        details = tuple(f"rank {rank} on {hosts[rank]}: {text.splitlines()[0]}" for rank, text in errors.items())
        is_memory = any("out of memory" in text.lower() or "OutOfMemory" in text for text in errors.values())
        advice = (
            ("--batch_size with a smaller number, or --max_device_batch_size to accumulate gradients",)
            if is_memory
            else ("correct the error in the model or its data",)
        )
        return Check("one step", FAIL, "a step of the model fails", details, advice)
    seconds = {rank: result["seconds"] for rank, result in enumerate(results) if result}
    slow = slow_ranks(seconds)
    median = sorted(seconds.values())[(len(seconds) - 1) // 2]
    peak = max(result["peak_bytes"] for result in results if result)
    details = tuple(
        f"rank {rank} on {hosts[rank]} takes {1e3 * seconds[rank]:,.1f} ms, {seconds[rank] / median:.1f} times the median"
        for rank in slow
    )
    advice = tuple(f"see which programs run on {hosts[rank]}, or exclude it" for rank in slow[:4])
    summary = f"a step takes {1e3 * median:,.1f} ms without communication; peak memory {peak / 1e9:,.1f} GB"
    values = {"ranks": results, "slow_factor": SLOW_FACTOR}
    return Check("one step", WARN if slow else OK, summary, details, advice, values)


def try_steps(world: WorldInfo, model: LightningModule, batch: Any, settings: Any) -> dict[str, Any]:
    """Trains a copy of the model on one batch with a Trainer of Lightning; returns time and peak memory of a step."""
    timer = _StepTimer()
    trainer = Trainer(
        accelerator=world.accelerator,
        devices=1 if world.accelerator == "cpu" else [world.index],
        max_steps=TRIED_STEPS,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[timer],
        plugins=[LightningEnvironment()],
        **settings,
    )
    if world.accelerator == "cuda":
        torch.cuda.reset_peak_memory_stats(world.index)
    trainer.fit(copy.deepcopy(model), _Repeated(batch, TRIED_STEPS))
    if world.accelerator == "cuda":
        peak = torch.cuda.max_memory_allocated(world.index)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": min(timer.seconds), "peak_bytes": peak}


class _Repeated:
    """A loader that returns the same batch several times."""

    def __init__(self, batch: Any, count: int) -> None:
        self.batch, self.count = batch, count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        return repeat(self.batch, self.count)


class _StepTimer(Callback):
    """Measures each step, including the work of the device."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._started = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self._started = self._now()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.append(self._now() - self._started)

    @staticmethod
    def _now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()
