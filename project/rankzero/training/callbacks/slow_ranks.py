"""Measures the time from the start of a step to its first gradient, and logs ranks that are slow."""

from collections import deque
from statistics import median
from time import monotonic
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from rankzero.distributed.monitoring.monitor import Monitor
from rankzero.training.hooks import LoopCallback

WINDOW = 20
"""Number of measured steps whose median is reported."""

MIN_MEASURED_STEPS = 5


class SlowRanks(LoopCallback):
    """Measures a few steps per second, each by a hook on the parameter that receives its gradient first.

    Args:
        monitor: Receives the measured times, and knows on rank zero which ranks are slow.
    """

    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor
        self._seconds: deque[float] = deque(maxlen=WINDOW)
        self._step: _MeasuredStep | None = None
        self._parameter: Parameter | None = None
        self._logged_count = 0

    def needs(self, hook: str) -> bool:
        return not self.monitor.is_single_process

    def on_tick(self, trainer: Trainer, batch: Any, batch_idx: int) -> None:
        self._finish_step()
        if self._parameter is None or not self._parameter.requires_grad:
            self._parameter = _last_parameter(trainer.lightning_module)
        if self._parameter is not None:
            self._step = _MeasuredStep(self._parameter, self.monitor)
        self._log(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish_step()
        self._log(trainer)

    def _finish_step(self) -> None:
        if self._step is None:
            return
        seconds, self._step = self._step.finish(), None
        if seconds is not None:
            self._seconds.append(seconds)
        if len(self._seconds) >= MIN_MEASURED_STEPS:
            self.monitor.activity.first_gradient = median(self._seconds)

    def _log(self, trainer: Trainer) -> None:
        """Writes new reports to TensorBoard; only rank zero has any."""
        reports = list(self.monitor.slow_ranks.values())
        for report in reports[self._logged_count :]:
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    logger.experiment.add_text("slow_ranks", report, trainer.global_step)
        self._logged_count = len(reports)


class _MeasuredStep:
    """Measures the next step; the time on a CUDA device is measured by events, without waiting for the device.

    Args:
        parameter: The parameter that receives its gradient first.
        monitor: Knows when the step began.
    """

    def __init__(self, parameter: Parameter, monitor: Monitor) -> None:
        self._monitor = monitor
        self._seconds: float | None = None
        self._events = None
        if parameter.is_cuda:
            self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._events[0].record()
        self._handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(self._record)

    def finish(self) -> float | None:
        """Removes the hook and returns the seconds; None if the step produced no gradient or is not complete."""
        self._handle.remove()
        if self._seconds is None or self._events is None:
            return self._seconds
        start, end = self._events
        return max(self._seconds, start.elapsed_time(end) / 1e3) if end.query() else None

    def _record(self, _: Tensor) -> None:
        if self._seconds is None:
            self._seconds = monotonic() - self._monitor.activity.batch_began
            if self._events is not None:
                self._events[1].record()


def _last_parameter(module: LightningModule) -> Parameter | None:
    """Returns the last trainable parameter, whose gradient usually is the first one of a backward pass."""
    return next((parameter for parameter in reversed(list(module.parameters())) if parameter.requires_grad), None)
