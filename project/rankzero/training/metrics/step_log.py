"""What a step records: `self.log` without repeated checks, and the losses and gradient norm of a logging interval."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torch.optim import Optimizer

from rankzero.sampling.batch_sampler import EVEN_SHARE
from rankzero.sampling.loader import samples_in
from rankzero.training.lightning_inside import FIRST_BATCH, ResultMetric, logger_connector, overrides
from rankzero.training.metrics.epoch_averages import Results


class StepLog:
    """Replacement for a module's `log` within `training_step`, for names that Lightning has logged in this epoch.

    Lightning (2.6) checks every call again and builds a new description of it. Here, a call with the same settings as
    before updates the metric directly. Lightning handles calls from all other hooks, even through a reference to `log`
    that `training_step` has stored.

    Attributes:
        owns_values: Whether no other code has the logged tensors, so that they need no copies.
    """

    owns_values = False

    def __init__(self, trainer: Trainer, results: Results) -> None:
        self.module, self._connector_vars = trainer.lightning_module, vars(logger_connector(trainer))
        self._module_vars = vars(self.module)
        self.results = results
        self._metrics: dict[str, tuple[dict[str, Any], tuple[Any, ...], ResultMetric]] = {}
        is_compiled = getattr(self.module, "_compiler_ctx", None) is not None
        self._replaces_log = not is_compiled and not overrides(self.module, "log", LightningModule)

    def __enter__(self) -> None:
        if self._replaces_log and "log" not in self._module_vars:
            self._module_vars["log"] = self

    def __exit__(self, *error: object) -> None:
        if self._module_vars.get("log") is self:
            del self._module_vars["log"]

    def __reduce__(self) -> Any:
        return getattr, (self.module, "log")  # a copy of the module gets that copy's `log`

    def __call__(self, name: str, value: Any, *arguments: Any, batch_size: int | None = None, **settings: Any) -> None:
        """Logs a value; takes the same arguments as `LightningModule.log`."""
        entry = self._metrics.get(name)
        if (
            entry
            and entry[0] == settings
            and entry[1] == arguments
            and self._connector_vars[FIRST_BATCH] is False
            and self._module_vars["_current_fx_name"] == "training_step"
        ):
            number = self._to_tensor(value)
            if number is not None and number.device == entry[2].value.device:
                self._update(entry[2], number, batch_size)
                return
        self._log_in_full(name, value, arguments, settings, {} if batch_size is None else {"batch_size": batch_size})

    def _log_in_full(self, name: str, value: Any, arguments: Any, settings: Any, size: Any) -> None:
        """Logs through Lightning, and stores the metric if the next call can update it directly."""
        LightningModule.log(self.module, name, value, *arguments, **settings, **size)  # type: ignore[misc]
        if self._module_vars["_current_fx_name"] != "training_step":
            return
        self._metrics.pop(name, None)
        metric = self.results.get(f"training_step.{name}")
        has_size = len(arguments) > 9  # a batch size without a keyword
        if metric is not None and metric.is_tensor and not metric.meta.enable_graph and not has_size:
            self._metrics[name] = settings, arguments, metric

    def _to_tensor(self, value: Any) -> Tensor | None:
        """Returns a value as Lightning stores it, or None if only Lightning's own `log` can convert it."""
        if type(value) is Tensor and value.is_floating_point() and value.numel() == 1:
            number = value if self.owns_values else value.detach().clone()
            if number.ndim:
                number = number.squeeze()
            return number if number.dtype in (torch.float32, torch.float64) else number.to(_default_dtype())
        if type(value) in (int, float):
            # `torch.tensor` would copy the number from the host to a GPU, and wait.
            return torch.full((), value, device=self.module.device, dtype=_default_dtype())
        return None

    def _update(self, metric: ResultMetric, value: Tensor, batch_size: int | None) -> None:
        """Updates a metric as `_ResultMetric.update` does.

        The attributes are set in the metric's `__dict__`: `_ResultMetric.__setattr__` does the same, more slowly.
        """
        meta, attributes = metric.meta, metric.__dict__
        attributes["_computed"] = None
        attributes["_update_count"] += 1
        if meta.on_step:
            cache = value
            if meta.sync.should:
                cache = meta.sync(value.clone())  # `sync` reduces in place
            attributes["_forward_cache"] = cache
            if not meta.on_epoch:
                attributes["value"] = cache
                return
        if meta.is_mean_reduction:
            size = self._batch_size() if batch_size is None else batch_size
            attributes["value"] = metric.value + value * size
            attributes["cumulated_batch_size"] = metric.cumulated_batch_size + size
        elif meta.is_sum_reduction:
            attributes["value"] = metric.value + value
        else:
            attributes["value"] = meta.reduce_fx(metric.value, value)

    def _batch_size(self) -> int:
        """Returns the size of the batch, as `_ResultCollection._extract_batch_size` finds it."""
        results = self.results
        if results.batch_size is None and results.batch is not None:
            results.batch_size = extract_batch_size(results.batch)
        return 1 if results.batch_size is None else results.batch_size


class IntervalRecord:
    """Losses, samples and gradient norm of the current logging interval, on this rank.

    Recording costs about 1 us per step on a CPU. On another device it costs one kernel per step; the sum is read at the
    end of the interval, because reading waits for the device. Nothing is recorded before `is_enabled` is set.

    Attributes:
        interval: Number of steps in an interval, the same on all ranks; 0 if none ends.
        is_due: Whether the step in progress ends the interval. Lightning logs the metrics of the same steps.
        loss_sum: Sum of the losses of all samples; on the device of the losses, so that reading it does not wait.
        broken_at: Number of the first step whose loss is NaN or infinite; NaN if there is none, or on another device.
        samples: Number of samples whose loss is recorded.
        total_samples: The same since the start of the attempt.
        gradient_norm: 2-norm of all gradients before clipping in the last step of the interval; None if unknown, as
            for sparse gradients. With several optimizers, of the one that took the last step.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.is_enabled = self.is_due = False
        self.interval = self.total_samples = 0
        self._resumed_start: int | None = None
        self._step = 0
        self.reset()

    def reset(self) -> None:
        self.loss_sum: float | Tensor = 0.0
        self.broken_at = math.nan
        self.samples = 0
        self._before_step = self._sums
        """The sums without the step in progress."""
        self.gradient_norm: float | Tensor | None = None

    @property
    def _sums(self) -> tuple[float | Tensor, int]:
        return self.loss_sum, self.samples

    def begin_batch(self, step: int) -> None:
        """Updates `is_due`, given the number of steps before this batch."""
        self.is_due = bool(self.interval) and (step + 1) % self.interval == 0
        if step != self._step:
            self._step, self._before_step = step, self._sums
        if self._resumed_start is not None:
            if self._resumed_start != self._start:  # a hook of the interval's last step had saved the checkpoint
                self.reset()
            self._resumed_start = None

    def add_loss(self, loss: Tensor, samples: int) -> None:
        """Adds the mean loss of a batch's samples on this rank; a batch that only keeps ranks in step has 0 samples."""
        if not samples:
            return
        self.samples += samples
        self.total_samples += samples
        if loss.is_cpu:
            self.loss_sum = self.loss_sum + loss.item() * samples
            if not math.isfinite(self.loss_sum) and math.isnan(self.broken_at):
                self.broken_at = self._step + 1.0
            return
        if not isinstance(self.loss_sum, Tensor):
            dtype = torch.float32 if loss.device.type == "mps" else torch.float64  # MPS has no float64
            self.loss_sum = torch.full((), self.loss_sum, dtype=dtype, device=loss.device)
        self.loss_sum = torch.add(self.loss_sum, loss.detach().reshape(()), alpha=samples)

    def add_outputs(self, outputs: Any, batch: Any) -> None:
        """Adds the loss in the outputs of Lightning's own optimization, if they contain one."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
        if not self.is_enabled or not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex():
            return
        if self._trainer.lightning_module.automatic_optimization:  # Lightning has divided the loss by the micro-batches
            loss = loss * self._trainer.accumulate_grad_batches
        self.add_loss(loss, samples_in(batch, getattr(self._trainer.strategy, "share", EVEN_SHARE)))

    def measure_gradients(self, optimizer: Optimizer) -> None:
        """Measures the norm of the gradients of an optimizer, which are averaged over ranks and not clipped yet."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        strategy = self._trainer.strategy
        device = strategy.root_device
        scaler = getattr(strategy.precision_plugin, "scaler", None)  # of 16-mixed; such an optimizer unscales itself
        is_scaled = scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False)
        if is_scaled or not gradients or any(gradient.is_sparse or gradient.device != device for gradient in gradients):
            return
        if device.type == "cpu":  # get_total_norm takes three times as long for a few small tensors
            self.gradient_norm = math.hypot(*[torch.linalg.vector_norm(gradient).item() for gradient in gradients])
        else:
            self.gradient_norm = torch.nn.utils.get_total_norm(gradients)

    @property
    def _start(self) -> int:
        """Number of steps before the interval that contains the next step."""
        steps: int = self._trainer.fit_loop.epoch_loop.steps_done  # type: ignore[attr-defined]
        return steps - steps % self.interval if self.interval else steps

    def discard_step(self) -> None:
        """Removes the losses of a step that is not taken."""
        self.loss_sum, self.samples = self._before_step

    def state(self, is_within_step: bool) -> dict[str, float]:
        """Returns the recorded losses as plain numbers, for a checkpoint in the middle of an interval.

        If a hook saves within a step, its losses are left out, because a resumed run takes the step again.
        """
        loss_sum, samples = self._before_step if is_within_step else self._sums
        return {"loss_sum": float(loss_sum), "samples": samples, "start": self._start}

    def load_states(self, states: Sequence[Mapping[str, float]]) -> None:
        """Continues the intervals of these ranks, if the run resumes within the same interval."""
        self.reset()
        self._resumed_start = next((int(state["start"]) for state in states), None)
        self.loss_sum = sum(state["loss_sum"] for state in states)
        self.samples = int(sum(state["samples"] for state in states))
        self._before_step = self._sums


def _default_dtype() -> torch.dtype:
    """Returns the dtype in which Lightning stores logged numbers: torch's default, but no lower than float32."""
    dtype = torch.get_default_dtype()
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32
