"""Measures the time from the start of a step to its first gradient, and logs ranks that are slow."""

from collections import deque
from statistics import median
from time import monotonic
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from rankzero.distributed.monitoring.monitor import Monitor
from rankzero.show.tensorboard_logger import DurableTensorBoardLogger
from rankzero.training.fit_loop import fit_loop_of
from rankzero.training.hooks import LoopCallback

WINDOW = 20
"""Number of measured steps whose median is reported."""

MIN_MEASURED_STEPS = 5


class SlowRanks(LoopCallback):
    """Measures a few steps per second, each by a hook on the parameter that receives its gradient first."""

    def __init__(self, monitor: Monitor, logger: DurableTensorBoardLogger | None) -> None:
        self.monitor, self.logger = monitor, logger
        self._seconds: deque[float] = deque(maxlen=WINDOW)
        self._step: _MeasuredStep | None = None
        self._parameter: Parameter | None = None
        self._logged_count = 0

    def needs(self, hook: str) -> bool:
        return not self.monitor.is_single_process

    def on_tick(self, trainer: Trainer, batch: Any, batch_idx: int) -> None:
        if self._step is not None and not self._step.is_complete:
            return
        self._finish_step()
        if self._parameter is None or not self._parameter.requires_grad:
            # The last parameter that had a gradient: in a backward pass, its gradient comes early.
            trainable = [parameter for parameter in trainer.lightning_module.parameters() if parameter.requires_grad]
            used = [parameter for parameter in trainable if parameter.grad is not None]
            self._parameter = next(reversed(used or trainable), None)
        if self._parameter is not None and not fit_loop_of(trainer).epoch_loop.batch_progress.is_last_batch:
            self._step = _MeasuredStep(self._parameter, self.monitor)
        self._log(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._cancel_step()
        self._log(trainer)

    def _cancel_step(self, *_: Any, **__: Any) -> None:
        """Drops the measurement in progress, which would include a validation or the end of an epoch."""
        if self._step is not None:
            self._step.handle.remove()
            self._step = None

    on_validation_start = on_train_epoch_end = on_exception = _cancel_step

    def _finish_step(self) -> None:
        if self._step is None:
            return
        seconds = self._step.seconds
        self._cancel_step()
        if seconds is None:
            self._parameter = None  # the parameter may be unused
            return
        self._seconds.append(seconds)
        if len(self._seconds) >= MIN_MEASURED_STEPS:
            self.monitor.activity.first_gradient = median(self._seconds)

    def _log(self, trainer: Trainer) -> None:
        """Writes new reports to TensorBoard; only rank zero has any."""
        reports = list(self.monitor.slow_ranks.values())
        for report in reports[self._logged_count :]:
            if self.logger:
                self.logger.log_text("slow_ranks", report, trainer.global_step)
        self._logged_count = len(reports)


class _MeasuredStep:
    """Measures the next step; the time on a CUDA device is measured by events, without waiting for the device."""

    def __init__(self, parameter: Parameter, monitor: Monitor) -> None:
        self._monitor = monitor
        self._host_seconds: float | None = None
        self._events = None
        if parameter.is_cuda:
            self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._events[0].record()
        self.handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(self._record)

    @property
    def is_complete(self) -> bool:
        """Whether the device has computed the gradient; True if the step produced none."""
        return self._host_seconds is None or self._events is None or bool(self._events[1].query())

    @property
    def seconds(self) -> float | None:
        """The seconds of a complete step; None if it produced no gradient."""
        if self._host_seconds is None or self._events is None:
            return self._host_seconds
        start, end = self._events
        return max(self._host_seconds, float(start.elapsed_time(end)) / 1e3)

    def _record(self, _: Tensor) -> None:
        if self._host_seconds is None and not (self._events and torch.cuda.is_current_stream_capturing()):
            self._host_seconds = monotonic() - self._monitor.activity.batch_began
            if self._events is not None:
                self._events[1].record()
