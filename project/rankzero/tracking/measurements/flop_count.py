"""Counts the floating-point operations of a training step."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks.throughput_monitor import _plugin_to_compute_dtype
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from rankzero.distributed.monitoring.activity import BACKWARD, FORWARD, Activity
from rankzero.training.metrics.interval_record import IntervalRecord


class FlopCount(TorchDispatchMode):
    """Counts the operations of the forward and backward pass of one batch, by torch's formulas.

    Used as a context manager around the first batch of an attempt. It observes operators after they have run and
    changes none of them, so that the step has the same result. Operators without a formula count as zero, as do
    element-wise ones. It replaces `FlopCounterMode`, which raises an error if a formula does not know its arguments.

    Args:
        activity: The phase of the main thread.
        record: The samples of the current logging interval.

    Attributes:
        flops: Number of operations on this rank.
        samples: Number of samples on this rank.
    """

    def __init__(self, activity: Activity, record: IntervalRecord) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._activity, self._record = activity, record
        self.flops = self.samples = 0

    @property
    def per_sample(self) -> float | None:
        """Number of operations per sample; None if none were counted."""
        return self.flops / self.samples if self.flops and self.samples else None

    def __enter__(self) -> "FlopCount":
        self._samples_before = self._record.samples
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.samples = self._record.samples - self._samples_before

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None and self._activity.phase in (FORWARD, BACKWARD):
            with suppress(Exception):  # a formula that does not know these arguments
                self.flops += formula(*args, **(kwargs or {}), out_val=result)
        return result


def can_count(module: LightningModule) -> bool:
    """Whether operations can be counted; a compiled module would run uncompiled, with other memory needs."""
    return getattr(module, "_compiler_ctx", None) is None and not any(
        isinstance(submodule, torch._dynamo.OptimizedModule) or submodule._compiled_call_impl is not None
        for submodule in module.modules()
    )


def peak_flops_per_second(trainer: Trainer) -> float | None:
    """Returns the published peak of this rank's device in the precision of the run; None if Lightning has no figure."""
    try:
        return get_available_flops(trainer.strategy.root_device, _plugin_to_compute_dtype(trainer.precision_plugin))
    except Exception:  # an unknown chip or precision
        return None
