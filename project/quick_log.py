"""What `self.log` does in a training step, without finding out anew each time what it found out the time before."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import _get_default_dtype, _ResultMetric
from torch import Tensor

from project.batch_hooks import overrides
from project.logged_metrics import Results
from project.strategies import RunStrategy

Settings = tuple[Any, ...]


class QuickLog:
    """Stands in for a module's `log` within `training_step`, once a name has been logged in full in an epoch.

    Lightning (2.6) checks and describes each call anew, and where it is asked to average over ranks has them talk in
    every step, though the value is looked at once in a logging interval. Here what was checked is not checked again,
    and what is to be averaged waits for the end of the interval, and then goes over the network in one piece.

    Args:
        trainer: The Trainer.
        strategy: Its strategy.
        results: Where values are gathered.
        waits: Whether averages over ranks may wait: nobody looks at them in between.
    """

    def __init__(self, trainer: Trainer, strategy: RunStrategy, results: Results, waits: bool) -> None:
        self.module, self.connector = trainer.lightning_module, trainer._logger_connector
        self.strategy, self.results, self.waits = strategy, results, waits
        self._waiting: dict[str, tuple[_ResultMetric, Tensor]] = {}
        self._known: dict[str, tuple[Settings, _ResultMetric]] = {}
        is_compiled = getattr(self.module, "_compiler_ctx", None) is not None
        self._stands_in = not is_compiled and not overrides(self.module, "log", LightningModule)

    def __enter__(self) -> None:
        if self._stands_in:
            vars(self.module)["log"] = self

    def __exit__(self, *error: object) -> None:
        if self._stands_in:
            vars(self.module).pop("log", None)

    def __reduce__(self) -> Any:
        return getattr, (self.module, "log")  # a copy of the module has its own

    def __call__(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """As `LightningModule.log`."""
        settings = (
            *(prog_bar, logger, on_step, on_epoch, reduce_fx, enable_graph, sync_dist, sync_dist_group),
            *(add_dataloader_idx, metric_attribute, rank_zero_only),
        )
        known = self._known.get(name)
        if self.strategy.share.idle:  # what other ranks do not log cannot wait for them
            self._log_as_ever(name, value, settings, batch_size)
            return
        if known and known[0] == settings and self.connector._first_loop_iter is False:
            number = self._number(value)
            if number is not None and number.device == known[1].value.device:
                self._update(name, known[1], number, batch_size)
                return
        self._log_in_full(name, value, settings, batch_size)

    def reduce(self) -> None:
        """Reduces over ranks what has been waiting for it. All ranks must call."""
        alike: dict[Any, list[tuple[_ResultMetric, Tensor]]] = {}
        for metric, value in self._waiting.values():
            sync = metric.meta.sync
            operation = "sum" if sync.op == "mean" else sync.op
            alike.setdefault((operation, sync.group, value.dtype, value.device), []).append((metric, value))
        self._waiting = {}
        for (operation, group, *_), waiting in alike.items():
            together = torch.stack([value for _, value in waiting])
            ranks = self.strategy.reduce_together(together, operation, group)
            for (metric, _), value in zip(waiting, together.unbind(), strict=True):
                _show(metric, value / ranks if metric.meta.sync.op == "mean" else value)

    def _log_in_full(self, name: str, value: Any, settings: Settings, batch_size: int | None) -> None:
        """As Lightning does; and remembers it, if the next time can be quicker."""
        self._log_as_ever(name, value, settings, batch_size)
        self._waiting.pop(name, None)
        self._known.pop(name, None)
        metric = self.results.get(f"training_step.{name}")
        if metric is None or not metric.is_tensor or metric.meta.enable_graph:
            return
        if self.waits or not (metric.meta.on_step and _is_reduced(metric)):
            self._known[name] = settings, metric

    def _log_as_ever(self, name: str, value: Any, settings: Settings, batch_size: int | None) -> None:
        *plain, attribute, rank_zero_only = settings
        LightningModule.log(self.module, name, value, *plain, batch_size, attribute, rank_zero_only)  # type: ignore[call-arg]

    def _number(self, value: Any) -> Tensor | None:
        """A value as Lightning keeps it, or None if that takes a closer look."""
        if type(value) is Tensor and value.is_floating_point() and value.numel() == 1:
            number = value.detach().clone()
            if number.ndim:
                number = number.squeeze()
            return number if number.dtype in (torch.float32, torch.float64) else number.to(_get_default_dtype())
        if type(value) in (int, float):
            return torch.tensor(value, device=self.module.device, dtype=_get_default_dtype())
        return None

    def _update(self, name: str, metric: _ResultMetric, value: Tensor, batch_size: int | None) -> None:
        """As `_ResultMetric.update`, but for a value that waits."""
        meta = metric.meta
        metric._computed = None
        metric._update_count += 1
        if meta.on_step:
            if _is_reduced(metric):
                self._waiting[name] = metric, self.strategy.part(value, meta.sync.op)
            else:
                _show(metric, value)
        if not meta.on_epoch:
            return
        if meta.is_mean_reduction:
            size = self.results._extract_batch_size(metric, batch_size, meta)
            metric.value = metric.value + value * size
            metric.cumulated_batch_size = metric.cumulated_batch_size + size
        elif meta.is_sum_reduction:
            metric.value = metric.value + value
        else:
            metric.value = meta.reduce_fx(metric.value, value)


def _is_reduced(metric: _ResultMetric) -> bool:
    """Whether ranks talk about a value."""
    return metric.meta.sync.should and not metric.meta.sync.rank_zero_only


def _show(metric: _ResultMetric, value: Tensor) -> None:
    metric._forward_cache = value
    if not metric.meta.on_epoch:
        metric.value = value
