"""Measures the number of training samples and the samples per second."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from rankzero.sampling.batch_sampler import EVEN_SHARE
from rankzero.sampling.loader import batch_size
from rankzero.sampling.plan import SamplingPlan
from rankzero.training.fit_loop import fit_loop_of
from rankzero.training.hooks import LoopCallback


class Throughput(LoopCallback):
    """Counts training samples over all ranks, and the seconds spent on training, without validation."""

    def __init__(self, plan: SamplingPlan) -> None:
        self.plan = plan
        self._samples = self._attempt_samples = self._consumed = 0
        self._trainer: Trainer | None = None
        self._is_on_gpu = False
        self._last_tick: torch.cuda.Event | None = None
        self.seconds = 0.0
        """Training time of this attempt, without the interval that is being measured."""
        self.paused_seconds = 0.0
        """Time of this attempt that `paused` has excluded."""
        self._started_at: float | None = None

    @property
    def samples_per_second(self) -> float:
        """Training speed of this attempt over all ranks."""
        seconds = self.training_seconds
        return self.attempt_samples / seconds if seconds > 0 else 0.0

    @property
    def training_seconds(self) -> float:
        """Training time of this attempt, with the interval that is being measured."""
        return self.seconds + (time.perf_counter() - self._started_at if self._started_at is not None else 0.0)

    @property
    def samples(self) -> int:
        """Number of samples in all attempts."""
        self._count_trained_batches()
        return self._samples

    @property
    def attempt_samples(self) -> int:
        """Number of samples in this attempt."""
        self._count_trained_batches()
        return self._attempt_samples

    def needs(self, hook: str) -> bool:
        if hook == "on_tick":
            return self._is_on_gpu
        # With `counted_order`, `_count_trained_batches` counts the batches.
        return hook != "on_batch_done" or self.plan.counted_order is None

    def on_ready(self, trainer: Trainer) -> None:
        self._trainer, self._is_on_gpu = trainer, trainer.strategy.root_device.type == "cuda"
        self._consumed = self.plan.counted_order.start_position.samples if self.plan.counted_order else 0
        self._started_at = time.perf_counter()  # Lightning does not call on_train_epoch_start in a resumed epoch

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._consumed = 0
        self._started_at = time.perf_counter()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pause()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._started_at = time.perf_counter()

    def on_batch_done(self, trainer: Trainer, batch: Any, batch_idx: int) -> None:
        orders = self.plan.training_orders
        orders = [] if any(order.counts_batches for order in orders) else orders
        share = getattr(trainer.strategy, "share", EVEN_SHARE)  # set for each batch by Rankzero's strategies
        if orders and share is not EVEN_SHARE:
            count = share.total
        elif orders:
            count = sum(order.samples_in(batch_idx) for order in orders)
        else:  # a user's order: assume that all ranks have as many samples as this rank
            count = (batch_size(batch) or 0) * trainer.world_size
        self._add(count)

    def on_tick(self, trainer: Trainer, batch: Any, batch_idx: int) -> None:
        """Lets the host run ahead of a GPU by at most one tick, so that its clock measures the GPU's speed."""
        if self._last_tick is not None:
            self._last_tick.synchronize()
        self._last_tick = torch.cuda.Event()
        self._last_tick.record()

    def _add(self, count: int) -> None:
        self._samples += count
        self._attempt_samples += count

    def _count_trained_batches(self, at_end: bool = False) -> None:
        """Counts new samples of the current epoch, or with `at_end` of the epoch that has just ended."""
        order, loop = self.plan.counted_order, fit_loop_of(self._trainer) if self._trainer else None
        if order is not None and loop is not None and (at_end or loop.is_within_epoch):
            consumed = order.consumed(loop.epoch_loop.batches_trained)
            self._add(consumed - self._consumed)
            self._consumed = consumed

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._count_trained_batches(at_end=True)
        self._pause()

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._samples = state_dict["samples"]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the duration of a `with` block from the training time."""
        is_measuring = self._started_at is not None
        self._pause()
        began = time.perf_counter()
        try:
            yield
        finally:
            self.paused_seconds += time.perf_counter() - began
            if is_measuring:
                self._started_at = time.perf_counter()

    def _pause(self) -> None:
        if self._started_at is not None:
            self.seconds += time.perf_counter() - self._started_at
            self._started_at = None
