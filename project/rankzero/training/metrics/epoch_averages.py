"""Values that `self.log` gathers over an epoch: combined over all ranks, and carried from one attempt to the next.

Lightning (2.6) reduces metric by metric, and hangs if one rank has logged a metric that another rank has not. Here the
ranks exchange all gathered values once, at the end of an epoch. Sums and counts are added up, with or without
`sync_dist`.
"""

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from rankzero.distributed.devices import HostCopy
from rankzero.messages import is_peer_failure
from rankzero.training import lightning_inside as stock
from rankzero.training.strategies import strategy_of

GatheredValues = dict[str, dict[str, Any]]
"""Key -> the arguments with which it was logged; except for a torchmetrics metric, also `value` and `weight`."""

_LOG_SETTINGS = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph"),
    *("add_dataloader_idx", "dataloader_idx", "metric_attribute"),
)
_REDUCTIONS: dict[str, Any] = {"mean": torch.mean, "sum": torch.sum, "max": torch.max, "min": torch.min}
_REDUCTIONS |= {"built-in sum": sum, "built-in max": max, "built-in min": min}


class Results(stock.ResultCollection):
    """Lightning's result collection, with the metrics of an epoch that an earlier attempt began.

    A torchmetrics metric whose `compute` raises an error is NaN. In Lightning (2.6), such an error ends training,
    although only one value is missing. Here, it ends the run only in the validation before training, which exists to
    find mistakes early. Lost ranks and a lack of memory end it too.

    Attributes:
        resumed_values: The values that the earlier attempt gathered; a key is removed when it is logged again. A
            torchmetrics metric saves its state itself.
    """

    def __init__(self, trainer: Trainer, training: bool = True) -> None:
        super().__init__(training)
        self._trainer = trainer
        self._failed_names: set[str] = set()
        self.resumed_values: GatheredValues = {}

    def log(self, fx: str, name: str, value: Any, *arguments: Any, **settings: Any) -> None:
        super().log(fx, name, value, *arguments, **settings)
        if self.resumed_values:
            self.add_resumed_value(f"{fx}.{name}")

    def add_resumed_value(self, key: str) -> None:
        """Adds the value of the earlier attempt to the value that has been logged since."""
        entry, metric = self.resumed_values.pop(key, None), self.get(key)
        if entry is None or metric is None or "value" not in entry:
            return
        resumed_value = entry["value"].to(metric.value.device)
        if metric.meta.is_max_reduction or metric.meta.is_min_reduction:
            metric.value = metric.meta.reduce_fx(metric.value, resumed_value)
        else:
            metric.value = metric.value + resumed_value
        if metric.meta.is_mean_reduction:
            metric.cumulated_batch_size = metric.cumulated_batch_size + entry["weight"].to(metric.value.device)

    def compute(self, metric: stock.ResultMetric) -> None:
        """Computes a torchmetrics metric over all ranks. All ranks must call."""
        error: Exception | None = None
        try:
            metric.compute()
        except Exception as raised:
            if self._trainer.sanity_checking or _is_fatal(raised):
                raise
            error = raised
        is_synchronized = not metric.meta.sync.rank_zero_only and getattr(metric.value, "sync_on_compute", False)
        has_failed = error is not None
        if self._trainer.world_size > 1 and is_synchronized:  # the ranks have to agree on the value
            has_failed = self._trainer.strategy.reduce_boolean_decision(has_failed, all=False)
        if not has_failed:
            return
        value = torch.tensor(math.nan, device=self._trainer.strategy.root_device)
        metric._computed = value  # type: ignore[assignment]  # Lightning declares None
        name = metric.meta.name
        if name not in self._failed_names:
            self._failed_names.add(name)
            logging.getLogger("rankzero").warning("metric %s", name, exc_info=error)
            cause = "an error on another rank" if error is None else repr(error)
            consequence = "cannot be computed and is NaN in this epoch; training continues"
            rank_zero_warn(f"rankzero: the metric {name!r} {consequence}: {cause}")

    def metrics(self, on_step: bool) -> Any:
        """Returns the values as Lightning does, those of the progress bar on a GPU as tensors, without waiting."""
        if self._trainer.strategy.root_device.type != "cuda":
            return super().metrics(on_step)
        found: dict[str, dict[str, Any]] = {"callback": {}, "log": {}, "pbar": {}}
        for _, metric in self.valid_items():
            value = self._get_cache(metric, on_step)
            if not isinstance(value, Tensor):
                continue
            is_numbered = metric.meta.add_dataloader_idx and metric.meta.dataloader_idx is not None
            suffix = self.DATALOADER_SUFFIX.format(metric.meta.dataloader_idx) if is_numbered else ""
            name, forked_name = metric.meta.name + suffix, metric.meta.forked_name(on_step) + suffix
            if metric.meta.logger:
                found["log"][forked_name] = value
            if self.training or (metric.meta.on_epoch and not on_step):
                found["callback"] |= {name: value, forked_name: value}
            if metric.meta.prog_bar:
                found["pbar"][forked_name] = value
        return found

    # A static method in Lightning, which calls it on the instance.
    def _get_cache(self, result_metric: stock.ResultMetric, on_step: bool) -> Tensor | None:  # type: ignore[override]
        is_due = not on_step and not result_metric.is_tensor and result_metric.meta.on_epoch
        if is_due and result_metric._computed is None:
            self.compute(result_metric)
        return super()._get_cache(result_metric, on_step)


def _is_fatal(error: Exception) -> bool:
    """Whether an error of `compute`, which also synchronizes ranks, is a lost rank or a lack of memory."""
    return (
        isinstance(error, torch.distributed.DistError | torch.OutOfMemoryError | MemoryError)
        or is_peer_failure(error)
        or (isinstance(error, RuntimeError) and bool(re.search("out of memory|can't allocate memory", str(error))))
    )


class LoggerConnector(stock.LoggerConnector):
    """Lightning's logger connector with metrics that are exact over ranks.

    Attributes:
        run_logger: The run's own logger, which receives all values of a fit; None if nothing is logged.
        holds_rows: Whether the user's loggers receive the values of a step that ends an interval by `complete_row`.
    """

    def __init__(self, trainer: Trainer, run_logger: Logger | None = None) -> None:
        super().__init__(trainer)
        self.run_logger, self.holds_rows = run_logger, False
        self._held_row: tuple[dict[str, Any], int] | None = None
        self._copied_row: Callable[[], None] | None = None

    @property
    def progress_bar_metrics(self) -> dict[str, Any]:
        """The numbers that the progress bar shows; reading them waits for a GPU once."""
        metrics = unread_progress_bar_metrics(self.trainer)
        metrics.update(convert_tensors_to_scalars(HostCopy(metrics).wait()))
        return metrics

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Logs a row of values as Lightning does, and to the run's own logger as well.

        The row of a training step on a GPU reaches the loggers at the latest with the next row.
        """
        trainer, loop = self.trainer, self.trainer.fit_loop.epoch_loop
        self.deliver_row()
        if not trainer.loggers or not metrics:
            return
        stock.shown_metrics(trainer)["log"].update(metrics)
        row, epoch, loggers = HostCopy(metrics), trainer.current_epoch, list(trainer.loggers)
        is_of_step = step is None and vars(self)[stock.FIRST_BATCH] is not None
        next_step = loop._batches_that_stepped
        holds = self.holds_rows and is_of_step and loop.record.is_due and loop.record.is_enabled  # type: ignore[attr-defined]
        if trainer.state.fn is TrainerFn.FITTING and not trainer.fit_loop.is_trial:  # type: ignore[attr-defined]
            loggers = list(dict.fromkeys(filter(None, [*loggers, self.run_logger])))

        def deliver() -> None:
            values, row_step = convert_tensors_to_scalars(row.wait()), step
            if row_step is None and (row_step := values.pop("step", None)) is None:
                values.setdefault("epoch", epoch)
                row_step = next_step
            if holds:
                self._held_row = values, int(row_step)
            for logger in loggers:
                if not holds or logger is self.run_logger:
                    logger.log_metrics(metrics=values, step=int(row_step))
                    logger.save()

        self._copied_row = deliver
        if not is_of_step or row.is_complete:
            self.deliver_row()

    def deliver_row(self) -> None:
        """Logs the row that is still being copied from a GPU, if there is one."""
        deliver, self._copied_row = self._copied_row, None
        if deliver:
            deliver()

    def complete_row(self, values: Mapping[str, float], step: int) -> None:
        """Logs the row of a step to the user's loggers, with further values."""
        self.deliver_row()
        row, step = self._held_row or ({"epoch": self.trainer.current_epoch}, step)
        self._held_row = None
        for logger in self.trainer.loggers:
            if logger is not self.run_logger:
                logger.log_metrics(metrics={**values, **row}, step=step)
                logger.save()

    def on_batch_end(self) -> None:
        """Agrees on a stop that the hooks of a training batch have requested; Lightning's own loop calls this."""
        super().on_batch_end()
        agreements = self.trainer.fit_loop.epoch_loop.agreements  # type: ignore[attr-defined]
        if self.trainer.training and self.trainer.should_stop and agreements:  # not in an evaluation
            agreements.agree_on_stop()

    def update_train_step_metrics(self) -> None:
        """Logs a step's metrics; called by Lightning's own loop. All ranks must call."""
        super().update_train_step_metrics()
        results, loop = self.trainer._results, self.trainer.fit_loop
        if isinstance(results, Results) and not loop.epoch_loop.should_accumulate() and loop.epoch_loop.record.is_due:  # type: ignore[attr-defined]
            loop.call("on_interval_end")  # type: ignore[attr-defined]

    def epoch_end_reached(self) -> None:
        """Combines the epoch's metrics over ranks; Lightning calls this after the last batch. All ranks must call."""
        super().epoch_end_reached()
        results = self.trainer._results
        if isinstance(results, Results):
            for key, description in list(results.resumed_values.items()):
                results[key] = _restored_metric(description, self.trainer)
                results.add_resumed_value(key)
        if self.trainer.world_size > 1:
            for metric in self.trainer.lightning_module.modules():
                if isinstance(metric, Metric):
                    metric.dist_sync_fn = metric.dist_sync_fn or _gather_states
            _combine_over_ranks(self.trainer)

    def on_epoch_end(self) -> None:
        """Warns if ranks have logged different values; called after the epoch's end hooks. All ranks must call."""
        if self.trainer.world_size > 1:
            _warn_of_differing_values(self.trainer)
        super().on_epoch_end()


def unread_progress_bar_metrics(trainer: Trainer) -> dict[str, Any]:
    """Returns the values that the progress bar shows; on a GPU, values since the last read are tensors."""
    return dict(stock.LoggerConnector.progress_bar_metrics.fget(stock.logger_connector(trainer)))  # type: ignore[attr-defined]


def logger_connector_of(trainer: Trainer) -> LoggerConnector:
    """Returns the Trainer's logger connector, which `install` has replaced."""
    connector = stock.logger_connector(trainer)
    assert isinstance(connector, LoggerConnector)
    return connector


def install(trainer: Trainer, run_logger: Logger | None = None) -> None:
    """Replaces Lightning's logger connector, and the results of the validation in `fit`."""
    stock.replace_logger_connector(trainer, LoggerConnector(trainer, run_logger))
    trainer.fit_loop.epoch_loop.val_loop._results = Results(trainer, training=False)


def gathered_values(results: Any) -> GatheredValues:
    """Returns the values that this rank has gathered for the reduction at the epoch's end, including resumed ones."""
    local_values = {
        key: _description(metric)
        for key, metric in results.valid_items()
        if metric.meta.on_epoch
        and metric._computed is None
        and not metric.meta.sync.rank_zero_only
        and metric.meta.sync.group is None
    }
    return {**(results.resumed_values if isinstance(results, Results) else {}), **local_values}


def merge(values_of_ranks: Sequence[GatheredValues]) -> GatheredValues:
    """Returns the values that a single rank would have gathered from the samples of all given ranks."""
    keys = dict.fromkeys(key for values in values_of_ranks for key in values)
    return {key: _merge_entries([values[key] for values in values_of_ranks if key in values]) for key in keys}


def _merge_entries(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if "value" not in entries[0]:
        return dict(entries[0])
    values = torch.stack([entry["value"].double() for entry in entries])
    reduction = entries[0]["reduction"].removeprefix("built-in ")
    value = values.amax() if reduction == "max" else values.amin() if reduction == "min" else values.sum()
    weight = torch.stack([entry["weight"] for entry in entries]).sum()
    return {**entries[0], "value": value.to(entries[0]["value"].dtype), "exact": value, "weight": weight}


def _combine_over_ranks(trainer: Trainer) -> None:
    """Sets every metric to its value over all ranks. All ranks must call."""
    results = trainer._results
    assert results is not None
    for key, entry in merge(strategy_of(trainer).gather(gathered_values(results))).items():
        metric = results.get(key)
        if metric is None or metric.has_reset:
            metric = results[key] = _restored_metric(entry, trainer)
        if not metric.is_tensor:
            compute = results.compute if isinstance(results, Results) else stock.ResultMetric.compute
            compute(metric)  # torchmetrics reduces over ranks itself
            continue
        value = entry["exact"] / entry["weight"] if metric.meta.is_mean_reduction else entry["exact"]
        metric._computed = value.to(entry["value"].dtype).to(trainer.strategy.root_device)


def _gather_states(state: Tensor, group: Any = None) -> list[Tensor]:
    """Returns a metric's state on each rank. All ranks must call.

    On a rank without samples, torchmetrics (1.9) has an empty tensor as state. Its dtype and shape may differ from
    those on the other ranks, so it is replaced by an empty tensor that can be concatenated with theirs.
    """
    shapes_and_dtypes: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(shapes_and_dtypes, (state.shape, state.dtype), group)
    shape, dtype = next((pair for pair in shapes_and_dtypes if pair[0].numel()), shapes_and_dtypes[0])
    if not state.numel():
        state = torch.empty((0, *shape[1:]), dtype=dtype, device=state.device)
    return gather_all_tensors(state, group)


def _description(metric: stock.ResultMetric) -> dict[str, Any]:
    meta = metric.meta
    names = {function: name for name, function in _REDUCTIONS.items()}
    description = {name: getattr(meta, name) for name in _LOG_SETTINGS}
    description |= {"reduction": names[meta.reduce_fx], "sync": meta.sync.should}
    if metric.is_tensor:
        weight = metric.cumulated_batch_size if meta.is_mean_reduction else torch.tensor(0)
        description |= {"value": metric.value.detach().cpu(), "weight": weight.detach().cpu()}
    return description


def _restored_metric(description: Mapping[str, Any], trainer: Trainer) -> stock.ResultMetric:
    """Returns a new metric with the described settings, as if this rank had logged it."""
    settings = {name: description[name] for name in _LOG_SETTINGS}
    meta = stock.Metadata(**settings, reduce_fx=_REDUCTIONS[description["reduction"]])
    meta.sync = stock.Sync(_should=description["sync"], fn=trainer.strategy.reduce)
    metric = stock.ResultMetric(meta, is_tensor="value" in description).to(trainer.strategy.root_device)
    if not metric.is_tensor:
        metric.value = trainer.lightning_module.get_submodule(description["metric_attribute"])
    return metric


def _warn_of_differing_values(trainer: Trainer) -> None:
    """Warns if ranks log different values at an epoch's end, for which no mean is exact. All ranks must call."""
    results = trainer._results
    assert results is not None
    gathered = gathered_values(results).items()
    local = {key: entry for key, entry in gathered if "value" in entry and entry["fx"].endswith("_epoch_end")}
    weights = {key: entry["weight"] if entry["reduction"] == "mean" else 1 for key, entry in local.items()}
    own = {key: float(entry["value"] / weights[key]) for key, entry in local.items()}
    values_of_ranks = strategy_of(trainer).gather(own)
    mean = "the mean over ranks is used, in which each rank has the same weight, whatever its number of samples"
    for key, entry in local.items():
        values = [values_of_rank[key] for values_of_rank in values_of_ranks if key in values_of_rank]
        if not max(values) - min(values) > 1e-6 * max(map(abs, values)):  # equal on all ranks, or one is NaN
            continue
        if entry["sync"] and not strategy_of(trainer).plan.is_uneven:
            continue
        consequence = mean if entry["sync"] else "only the value of rank zero is used"
        rank_zero_warn(
            f"rankzero: self.log({entry['name']!r}) in {entry['fx']} differs between ranks: {consequence}. "
            "If it is logged in the step, or as a torchmetrics metric, it is exact on any number of processes"
        )
