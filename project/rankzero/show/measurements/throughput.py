"""Measures the training samples, and counts the floating-point operations of a training step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.flop_counter import conv_flop_count
from torch.utils.hooks import RemovableHandle

from rankzero.distributed.monitoring.activity import BACKWARD, DATA, Activity
from rankzero.distributed.torch_inside import is_compiled
from rankzero.sampling.batch_sampler import EVEN_SHARE
from rankzero.sampling.loader import batch_size
from rankzero.sampling.plan import SamplingPlan
from rankzero.training.fit_loop import fit_loop_of
from rankzero.training.hooks import LoopCallback
from rankzero.training.metrics.step_log import IntervalRecord


class Throughput(LoopCallback):
    """Counts training samples over all ranks, and the seconds spent on training, without validation."""

    def __init__(self, plan: SamplingPlan) -> None:
        self.plan = plan
        self._samples = self._earlier_samples = self._consumed = 0
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
        return self.samples - self._earlier_samples

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
        counts_batches = any(order.counts_batches for order in orders)
        share = getattr(trainer.strategy, "share", EVEN_SHARE)  # set for each batch by Rankzero's strategies
        if share is not EVEN_SHARE and not counts_batches:
            count = share.total
        elif orders and not counts_batches:
            count = sum(order.samples_in(batch_idx) for order in orders)
        else:  # a user's order: assume that all ranks have as many samples as this rank
            count = (batch_size(batch) or 0) * trainer.world_size
        self._samples += count

    def on_tick(self, trainer: Trainer, batch: Any, batch_idx: int) -> None:
        """Lets the host run ahead of a GPU by at most one tick, so that its clock measures the GPU's speed."""
        if self._last_tick is not None:
            self._last_tick.synchronize()
        self._last_tick = torch.cuda.Event()
        self._last_tick.record()

    def _count_trained_batches(self, at_end: bool = False) -> None:
        """Counts new samples of the current epoch, or with `at_end` of the epoch that has just ended."""
        order, loop = self.plan.counted_order, fit_loop_of(self._trainer) if self._trainer else None
        if order is not None and loop is not None and (at_end or loop.is_within_epoch):
            consumed = order.consumed(loop.epoch_loop.batches_trained)
            self._samples += consumed - self._consumed
            self._consumed = consumed

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._count_trained_batches(at_end=True)
        self._pause()

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._earlier_samples += state_dict["samples"] - self._samples
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


CONVOLUTIONS = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d

COMPUTE_DTYPES = {"32": torch.float32, "64": torch.float64, "bf16": torch.bfloat16, "16": torch.float16}
"""Beginning of a precision such as `bf16-mixed` -> the dtype of its matrix products."""


class FlopCount:
    """Counts the operations of linear and convolutional layers in one batch, in the forward and the backward pass.

    Used as a context manager around the first batch of an attempt. It only observes the shapes of inputs and outputs;
    torch's `FlopCounterMode` counts all operators, but some operators and compiled functions fail or change under it.
    A forward pass that activation checkpointing repeats is not counted, as usual for the utilization of a device.
    Nothing is counted if a layer cannot be counted, because the total would be too small.
    """

    def __init__(self, module: LightningModule, activity: Activity, record: IntervalRecord) -> None:
        self._module, self._activity, self._record = module, activity, record
        self._handles: list[RemovableHandle] = []
        self.flops = self.samples = 0
        self._has_failed = False

    @property
    def per_sample(self) -> float | None:
        """Number of operations per sample; None if none were counted."""
        return self.flops / self.samples if self.flops and self.samples and not self._has_failed else None

    def __enter__(self) -> "FlopCount":
        self._samples_before = self._record.total_samples
        layers = [layer for layer in self._module.modules() if isinstance(layer, nn.Linear | CONVOLUTIONS)]
        self._handles = [layer.register_forward_hook(self._count) for layer in layers]
        return self

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self.samples = self._record.total_samples - self._samples_before

    def _count(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or self._activity.phase in (DATA, BACKWARD):
            return
        try:
            self.flops += _operations(layer, inputs[0], output)
        except Exception:  # an unusual layer: training continues
            self._has_failed = True


def _operations(layer: Any, inputs: Tensor, output: Tensor) -> int:
    """Returns the number of operations of a layer in the forward and the backward pass."""
    weight = layer.weight
    if isinstance(layer, nn.Linear):
        forward = 2 * output.numel() * layer.in_features
    elif inputs.ndim != weight.ndim:
        raise ValueError("an input without a batch dimension")
    else:
        forward = conv_flop_count(list(inputs.shape), list(weight.shape), list(output.shape), layer.transposed)
    # The backward pass takes as many operations for the gradient of the weights, and for that of the inputs.
    return int(forward * (1 + int(weight.requires_grad) + int(inputs.requires_grad)))


def can_count(module: LightningModule) -> bool:
    """Whether the operations of a module can be counted.

    Hooks would trigger recompilation of compiled code. Parametrized layers, attention and recurrent layers perform
    operations that are not counted, so the total would be too small.
    """
    return getattr(module, "_compiler_ctx", None) is None and not any(
        isinstance(submodule, (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase))
        or is_parametrized(submodule)
        or is_compiled(submodule)
        for submodule in module.modules()
    )


def peak_flops_per_second(trainer: Trainer) -> float | None:
    """Returns the published peak of this rank's device in the precision of the run; None if Lightning has no figure."""
    try:
        dtype = COMPUTE_DTYPES[trainer.precision.partition("-")[0]]
        return get_available_flops(trainer.strategy.root_device, dtype)
    except Exception:  # an unknown chip or precision
        return None
