"""Values that `self.log` gathers over an epoch: combined over all ranks, and carried from one attempt to the next.

Lightning (2.6) reduces metric by metric, and hangs if one rank has logged a metric that another rank has not. Here the
ranks exchange all gathered values once, at the end of an epoch. Sums and counts are added up, with or without
`sync_dist`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from sys import getrefcount
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from rankzero.training.metrics.step_averages import StepAverages
from rankzero.training.strategies import strategy_of

Gathered = dict[str, dict[str, Any]]
"""Key -> the arguments with which it was logged; except for a torchmetrics metric, also `value` and `weight`."""

_PLAIN = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph")
_PLACE = ("add_dataloader_idx", "dataloader_idx", "metric_attribute")
_REDUCTIONS = {"mean": torch.mean, "sum": torch.sum, "max": torch.max, "min": torch.min}
_BUILT_IN = {"built-in sum": sum, "built-in max": max, "built-in min": min}


class Results(_ResultCollection):
    """Lightning's result collection for training, with the metrics of an epoch that an earlier attempt began.

    Args:
        averages: Averages the values of a step over ranks.

    Attributes:
        carried: The values that the earlier attempt gathered; a key is removed when it is logged again. A torchmetrics
            metric saves its state itself.
        is_watched: Whether reads of the metrics count as reads by user code in the middle of an epoch.
    """

    def __init__(self, averages: StepAverages) -> None:
        super().__init__(training=True)
        self.averages = averages
        self.carried: Gathered = {}
        self.is_watched = False

    def log(self, fx: str, name: str, value: Any, *arguments: Any, **settings: Any) -> None:
        if settings.get("sync_dist"):
            settings["sync_dist_fn"] = self.averages.sync
        super().log(fx, name, value, *arguments, **settings)
        if self.carried:
            self.take_up(f"{fx}.{name}")

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        self.averages.key = key
        try:
            super().update_metrics(key, value, batch_size)
        finally:
            self.averages.key = ""

    def metrics(self, on_step: bool) -> Any:
        if self.is_watched:
            self.averages.note_read()
        return super().metrics(on_step)

    def unwatched_metrics(self, on_step: bool) -> Any:
        """Returns the metrics; the read does not count as one by user code."""
        return super().metrics(on_step)

    def reduce(self) -> None:
        """Reduces the values that `StepAverages` has deferred. All ranks must call."""
        self.averages.reduce(self)

    def take_up(self, key: str) -> None:
        """Adds the value of the earlier attempt to the value that has been logged since."""
        carried, metric = self.carried.pop(key, None), self.get(key)
        if carried is None or metric is None or "value" not in carried:
            return
        before = carried["value"].to(metric.value.device)
        if metric.meta.is_max_reduction or metric.meta.is_min_reduction:
            metric.value = metric.meta.reduce_fx(metric.value, before)
        else:
            metric.value = metric.value + before
        if metric.meta.is_mean_reduction:
            metric.cumulated_batch_size = metric.cumulated_batch_size + carried["weight"].to(metric.value.device)


class LoggerConnector(_LoggerConnector):
    """Lightning's logger connector with metrics that are exact over ranks.

    Args:
        trainer: The trainer.
    """

    def on_batch_end(self) -> None:
        """Records a read if user code holds the metrics; Lightning's own loop calls this after the hooks of a batch."""
        results = self.trainer._results
        is_held = max(map(getrefcount, shown_metrics_of(self))) > NOT_HELD
        if isinstance(results, Results) and results.is_watched and is_held:
            results.averages.note_read()
        with _unwatched(self.trainer):
            super().on_batch_end()

    def update_train_step_metrics(self) -> None:
        """Reduces deferred values and logs a step's metrics; called by Lightning's own loop. All ranks must call."""
        results = self.trainer._results
        logs = self.should_update_logs or self.trainer.fast_dev_run  # type: ignore[attr-defined]
        if logs and isinstance(results, Results) and not self.trainer.fit_loop._should_accumulate():
            results.reduce()
        with _unwatched(self.trainer):
            super().update_train_step_metrics()

    def epoch_end_reached(self) -> None:
        """Combines the epoch's metrics over ranks; Lightning calls this after the last batch. All ranks must call."""
        super().epoch_end_reached()
        results = self.trainer._results
        if isinstance(results, Results):
            for key, description in list(results.carried.items()):
                results[key] = _revived(description, self.trainer)
                results.take_up(key)
        if self.trainer.world_size > 1:
            for metric in self.trainer.lightning_module.modules():
                if isinstance(metric, Metric):
                    metric.dist_sync_fn = metric.dist_sync_fn or _from_all_ranks
            _add_up(self.trainer)

    def on_epoch_end(self) -> None:
        """Warns if ranks have logged different values; called after the epoch's end hooks. All ranks must call."""
        if self.trainer.world_size > 1:
            _warn_of_own_values(self.trainer)
        super().on_epoch_end()


shown_metrics_of = attrgetter("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
"""Function that returns the dictionaries of a connector that Lightning updates in every batch."""


class _Holder:
    def __init__(self) -> None:
        self.metrics: dict[str, Any] = {}


_holder = _Holder()
NOT_HELD = max(map(getrefcount, attrgetter("metrics", "metrics")(_holder))) - 1
"""The `getrefcount` of a dictionary that is referenced only by its object and by one tuple."""


@contextmanager
def _unwatched(trainer: Trainer) -> Iterator[None]:
    """Makes reads of the metrics within the block not count as reads by user code."""
    results = trainer._results
    watched = isinstance(results, Results) and results.is_watched
    if isinstance(results, Results):
        results.is_watched = False
    try:
        yield
    finally:
        if isinstance(results, Results):
            results.is_watched = watched


def install(trainer: Trainer) -> None:
    """Replaces Lightning's logger connector."""
    trainer._logger_connector = LoggerConnector(trainer)


def gathered(results: _ResultCollection) -> Gathered:
    """Returns the values that this rank has gathered for the reduction at the epoch's end, including carried ones."""
    own = {
        key: _description(metric)
        for key, metric in results.valid_items()
        if metric.meta.on_epoch
        and metric._computed is None
        and not metric.meta.sync.rank_zero_only
        and metric.meta.sync.group is None
    }
    return {**(results.carried if isinstance(results, Results) else {}), **own}


def merged(of_ranks: Sequence[Gathered]) -> Gathered:
    """Returns the values that a single rank would have gathered from the samples of all given ranks."""
    keys = dict.fromkeys(key for values in of_ranks for key in values)
    return {key: _merged([values[key] for values in of_ranks if key in values]) for key in keys}


def _merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if "value" not in parts[0]:
        return dict(parts[0])
    values = torch.stack([part["value"].double() for part in parts])
    reduction = parts[0]["reduction"].removeprefix("built-in ")
    value = values.amax() if reduction == "max" else values.amin() if reduction == "min" else values.sum()
    weight = torch.stack([part["weight"] for part in parts]).sum()
    return {**parts[0], "value": value.to(parts[0]["value"].dtype), "exact": value, "weight": weight}


def _add_up(trainer: Trainer) -> None:
    """Sets every metric to its value over all ranks. All ranks must call."""
    results = trainer._results
    assert results is not None
    for key, whole in merged(strategy_of(trainer).gather(gathered(results))).items():
        metric = results.get(key)
        if metric is None or metric.has_reset:
            metric = results[key] = _revived(whole, trainer)
        if not metric.is_tensor:
            metric.compute()  # torchmetrics reduces over ranks itself
            continue
        value = whole["exact"] / whole["weight"] if metric.meta.is_mean_reduction else whole["exact"]
        metric._computed = value.to(whole["value"].dtype).to(trainer.strategy.root_device)


def _from_all_ranks(state: Tensor, group: Any = None) -> list[Tensor]:
    """Returns a metric's state on each rank. All ranks must call.

    On a rank without samples, torchmetrics (1.9) has an empty tensor as state. Its dtype and shape may differ from
    those on the other ranks, so it is replaced by an empty tensor that can be concatenated with theirs.
    """
    forms: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(forms, (state.shape, state.dtype), group)
    shape, dtype = next((form for form in forms if form[0].numel()), forms[0])
    if not state.numel():
        state = torch.empty((0, *shape[1:]), dtype=dtype, device=state.device)
    gathered: list[Tensor] = gather_all_tensors(state, group)
    return gathered


def _description(metric: _ResultMetric) -> dict[str, Any]:
    meta = metric.meta
    names = {function: name for name, function in {**_REDUCTIONS, **_BUILT_IN}.items()}
    described = {name: getattr(meta, name) for name in (*_PLAIN, *_PLACE)}
    described |= {"reduction": names[meta.reduce_fx], "sync": meta.sync.should}
    if metric.is_tensor:
        weight = metric.cumulated_batch_size if meta.is_mean_reduction else torch.tensor(0)
        described |= {"value": metric.value.detach().cpu(), "weight": weight.detach().cpu()}
    return described


def _revived(description: Mapping[str, Any], trainer: Trainer) -> _ResultMetric:
    """Returns a new metric with the described settings, as if this rank had logged it."""
    meta = _Metadata(
        **{name: description[name] for name in (*_PLAIN, *_PLACE)},
        reduce_fx={**_REDUCTIONS, **_BUILT_IN}[description["reduction"]],  # type: ignore[arg-type]
    )
    results = trainer._results
    reduce = results.averages.sync if isinstance(results, Results) and description["sync"] else trainer.strategy.reduce
    meta.sync = _Sync(_should=description["sync"], fn=reduce)
    metric = _ResultMetric(meta, is_tensor="value" in description).to(trainer.strategy.root_device)
    if not metric.is_tensor:
        metric.value = trainer.lightning_module.get_submodule(description["metric_attribute"])
    return metric


def _warn_of_own_values(trainer: Trainer) -> None:
    """Warns if ranks log different values at an epoch's end, for which no mean is exact. All ranks must call."""
    results = trainer._results
    assert results is not None
    own = {
        key: entry
        for key, entry in gathered(results).items()
        if "value" in entry and entry["fx"].endswith("_epoch_end")
    }
    of_ranks = strategy_of(trainer).gather({key: _own_value(entry) for key, entry in own.items()})
    for key, entry in own.items():
        values = [values_of_rank[key] for values_of_rank in of_ranks if key in values_of_rank]
        if not max(values) - min(values) > 1e-6 * max(map(abs, values)):  # equal on all ranks, or one is NaN
            continue
        if not entry["sync"]:
            shown = "rank zero's alone is taken"
        elif strategy_of(trainer).plan.is_uneven:
            shown = "their mean is taken, in which a rank with fewer samples counts as much as one with more"
        else:
            continue
        rank_zero_warn(
            f"rankzero: self.log({entry['name']!r}) in {entry['fx']} has another value on each rank: {shown}. "
            "Logged in the step, or as a metric of torchmetrics, it is exact at any number of processes"
        )


def _own_value(description: Mapping[str, Any]) -> float:
    weight = description["weight"] if description["reduction"] == "mean" else torch.tensor(1)
    value: Tensor = description["value"] / weight
    return float(value)
