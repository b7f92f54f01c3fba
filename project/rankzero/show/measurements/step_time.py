"""Measures which parts of a step take how long, and which ranks are slow."""

from collections import deque
from itertools import pairwise
from statistics import median
from time import monotonic
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from rankzero.distributed.monitoring.activity import BACKWARD, CHECKPOINT, DATA, FORWARD, HOOK, OPTIMIZER, Activity
from rankzero.distributed.monitoring.monitor import Monitor
from rankzero.distributed.torch_inside import communication_times
from rankzero.show.tensorboard_logger import DurableTensorBoardLogger
from rankzero.training.fit_loop import fit_loop_of
from rankzero.training.hooks import LoopCallback


class SlowRanks(LoopCallback):
    """Measures a few steps per second, each by a hook on the parameter that receives its gradient first."""

    def __init__(self, monitor: Monitor, logger: DurableTensorBoardLogger | None) -> None:
        self.monitor, self.logger = monitor, logger
        self._seconds: deque[float] = deque(maxlen=20)  # measured steps whose median is reported
        self._step: _MeasuredStep | None = None
        self._parameter: Parameter | None = None
        self._logged_count = 0

    def needs(self, hook: str) -> bool:
        return not self.monitor.is_single_process

    def on_tick(self, trainer: Trainer, batch: Any, batch_idx: int) -> None:
        if self._step is not None:
            if not self._step.is_complete:
                return
            self._finish_step(self._step)
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

    def _finish_step(self, step: "_MeasuredStep") -> None:
        self._cancel_step()
        if step.seconds is None:
            self._parameter = None  # the parameter may be unused
            return
        self._seconds.append(step.seconds)
        if len(self._seconds) >= 5:
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


STEP_PHASES = {DATA: "data_wait", FORWARD: "forward", BACKWARD: "backward", OPTIMIZER: "optimizer", HOOK: "other"}
"""Phase of a step -> name of its part in the charts."""

DEVICE_PHASES = (FORWARD, BACKWARD, OPTIMIZER)

MAX_EVENTS = 1000
"""Number of events after which the measurement of a step ends, if no optimizer step is counted."""


class StepTime:
    """Splits the time of a step into parts, as means over the steps since the previous call of `take`.

    On a CPU, the times are those of the main thread. An accelerator runs behind the main thread; there, CUDA events
    measure forward pass, backward pass and optimizer in one step per interval.
    """

    def __init__(self, activity: Activity, trainer: Trainer) -> None:
        self._activity, self._trainer = activity, trainer
        self._device_times = DeviceTimes(activity) if trainer.strategy.root_device.type == "cuda" else None
        self.restart()

    @property
    def _steps(self) -> int:
        """Number of steps; `global_step` counts each optimizer of a module with manual optimization."""
        return int(self._trainer.fit_loop.epoch_loop.steps_done)  # type: ignore[attr-defined]

    def restart(self) -> None:
        """Begins a new interval."""
        self._seconds, self._step = dict(self._activity.seconds), self._steps

    def measure_step(self) -> None:
        """Begins to measure the step in progress on the device, if it is not a CPU and no step is being measured."""
        if self._device_times is not None:
            self._device_times.begin()

    def take(self) -> dict[str, float]:
        """Returns the parts of a step in milliseconds, and the seconds in which checkpoints blocked training.

        Parts that run on an accelerator are missing until a step has been measured there.
        """
        seconds = {phase: total - self._seconds[phase] for phase, total in self._activity.seconds.items()}
        steps = max(1, self._steps - self._step)
        self.restart()
        parts = {name: 1e3 * seconds[phase] / steps for phase, name in STEP_PHASES.items()}
        parts["step"] = total = sum(parts.values())
        on_device = self._device_times.take() if self._device_times is not None else None
        if on_device:
            parts |= on_device
            parts["other"] = max(0.0, total - parts["data_wait"] - sum(on_device.values()))
        if on_device == {}:
            parts = {name: parts[name] for name in ("step", "data_wait")}
        else:
            exposed = min(exposed_communication_ms(self._trainer.strategy.model), parts["backward"])
            parts |= {"exposed_communication": exposed, "backward": parts["backward"] - exposed}
        times = {f"wall_time/{name}_ms": value for name, value in parts.items()}
        return {**times, "wall_time/checkpoint_blocked_s": seconds[CHECKPOINT]}


def exposed_communication_ms(model: Any) -> float:
    """Returns the time that a backward pass waits for gradients of other ranks, after its own computation has ended.

    DistributedDataParallel measures it in its first ten steps and every hundredth step (torch 2.15); 0 before.
    """
    if not isinstance(model, DistributedDataParallel):
        return 0.0
    times = communication_times(model)
    # In nanoseconds, by CUDA events on a GPU; the time stamps, such as `backward_comm_time_end`, are the host's.
    waited: int = times.get("backward_comm_time", 0) - times.get("backward_compute_comm_overlap_time", 0)
    return 1e-6 * max(0, waited)


class DeviceTimes:
    """Measures the phases of single steps on a CUDA device by events, without waiting for the device."""

    def __init__(self, activity: Activity) -> None:
        self._activity = activity
        self._events: list[tuple[str, torch.cuda.Event]] = []
        self._measured: list[tuple[str, torch.cuda.Event]] = []
        self._step: int | None = None

    def begin(self) -> None:
        """Measures from here to the beginning of the next step, unless a step is being measured."""
        if self._step is None:
            self._events, self._step = [], self._activity.step
            self._activity.listen(self._record)

    def _record(self, phase: str) -> None:
        if torch.cuda.is_current_stream_capturing():  # the event would become part of the user's CUDA graph
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append((phase, event))
        # Further micro-batches belong to the same step.
        if phase == DATA and (self._activity.step != self._step or len(self._events) > MAX_EVENTS):
            self._activity.stop_listening(self._record)
            self._measured, self._step = self._events, None

    def take(self) -> dict[str, float]:
        """Returns the milliseconds of the phases of the last measured step; empty without a new one."""
        events = self._measured
        if not events or not events[-1][1].query():
            return {}
        self._measured = []
        parts = dict.fromkeys((STEP_PHASES[phase] for phase in DEVICE_PHASES), 0.0)
        for (phase, begin), (_, end) in pairwise(events):
            if phase in DEVICE_PHASES:
                parts[STEP_PHASES[phase]] += begin.elapsed_time(end)
        return parts
