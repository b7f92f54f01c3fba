"""`self.log` in a training step, without repeating the checks of the step before."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor

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


def _default_dtype() -> torch.dtype:
    """Returns the dtype in which Lightning stores logged numbers: torch's default, but no lower than float32."""
    dtype = torch.get_default_dtype()
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32
