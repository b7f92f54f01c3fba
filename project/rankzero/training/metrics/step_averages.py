"""Averages over ranks of the values that `training_step` logs with `sync_dist=True`."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from torch import Tensor

from rankzero.training.strategies import strategy_of

Deferred = tuple[Tensor, str]
"""This rank's contribution to a deferred value, and the name of the reduction."""

_MEANS = ("mean", "avg")


class StepAverages:
    """Reducer of logged values over ranks: in every step, or once per logging interval if no rank reads them earlier.

    Lightning (2.6) reduces each value in every step, although it writes the value only once per logging interval.
    Here, values are reduced in every step of the first whole epoch. If no rank has read such a value between two
    logging steps, later values are deferred to the end of the interval and reduced together. If a rank later reads one
    between two logging steps, all ranks permanently return to a reduction in every step.

    Args:
        trainer: The trainer.

    Attributes:
        defers: Whether values are deferred to the end of the logging interval. The same on all ranks.
        key: The key of the value that is being logged; otherwise empty.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.defers = False
        self.key = ""
        self._deferred: dict[str, Deferred] = {}
        self._has_new_values = self._was_read = self._has_observed_epoch = self._has_decided = False

    def sync(self, value: Tensor, group: Any = None, reduce_op: Any = None) -> Tensor:
        """Reduces or defers a value of this step; replaces a strategy's `reduce`. All ranks must call."""
        strategy = strategy_of(self._trainer)
        is_deferrable = self.key.startswith("training_step.") and group is None
        self._has_new_values |= is_deferrable
        if self.defers and is_deferrable and not strategy.share.has_empty_rank:
            self._deferred[self.key] = strategy.apply_metric_weight(value, reduce_op), str(reduce_op)
            return value
        self._deferred.pop(self.key, None)
        reduced: Tensor = strategy.reduce(value, group, reduce_op)
        return reduced

    def reduce(self, results: Mapping[str, _ResultMetric]) -> None:
        """Reduces the deferred values and stores them in their metrics. All ranks must call."""
        self._has_new_values = False
        groups: dict[Any, list[str]] = {}
        for key in sorted(self._deferred):
            value, operation = self._deferred[key]
            reduction = "sum" if operation in _MEANS else operation
            groups.setdefault((reduction, value.dtype, value.device), []).append(key)
        deferred, self._deferred = self._deferred, {}
        for (reduction, _, device), keys in groups.items():
            values = torch.stack([deferred[key][0] for key in keys])
            flag = torch.full((1,), float(self._was_read), dtype=values.dtype, device=device)
            packed = torch.cat((values, -flag if reduction == "min" else flag))
            ranks = strategy_of(self._trainer).reduce_in_place(packed, reduction)
            for key, value in zip(keys, packed[:-1].unbind(), strict=True):
                _store_value(results[key], value / ranks if deferred[key][1] in _MEANS else value)
            if self._was_read or packed[-1].item():
                self._was_read, self.defers = True, False

    def record_read(self) -> None:
        """Records that user code has read metrics within a logging interval."""
        if not self._has_new_values:
            return
        if self._deferred and not self._was_read:
            rank = self._trainer.global_rank
            warnings.warn(
                "rankzero: metrics with sync_dist=True were read between two logging steps, for the first time after "
                f"an epoch without such a read. Until the next logging step, rank {rank} reads its own values; from "
                "then on values are averaged over ranks in every step",
                stacklevel=2,
            )
        self._was_read = True

    def decide_deferral(self) -> None:
        """Decides before an epoch whether values are deferred from now on. All ranks must call."""
        if self._has_decided or not self._has_observed_epoch or self._trainer.world_size == 1:
            return
        self._has_decided = True
        (readers,) = strategy_of(self._trainer).sum_over_ranks([int(self._was_read)])
        self.defers, self._was_read = not readers, bool(readers)

    def record_epoch(self) -> None:
        """Records that a whole epoch was observed. All ranks must call."""
        self._has_observed_epoch = True


def _store_value(metric: _ResultMetric, value: Tensor) -> None:
    metric._forward_cache = value
    if not metric.meta.on_epoch:
        metric.value = value
