"""Errors of a user's torchmetrics metrics at the end of an epoch, which do not end training."""

import logging
import math
import re
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from rankzero.messages import is_peer_failure
from rankzero.training.lightning_inside import ResultCollection, ResultMetric


def _is_fatal(error: Exception) -> bool:
    """Whether an error of `compute`, which also synchronizes ranks, is a lost rank or a lack of memory."""
    return (
        isinstance(error, torch.distributed.DistError | torch.OutOfMemoryError | MemoryError)
        or is_peer_failure(error)
        or (isinstance(error, RuntimeError) and bool(re.search("out of memory|can't allocate memory", str(error))))
    )


class TolerantResults(ResultCollection):
    """Lightning's result collection, in which a torchmetrics metric whose `compute` raises an error is NaN.

    In Lightning (2.6), such an error ends training, although only one value is missing. Here, it ends the run only in
    the validation before training, which exists to find mistakes early. Lost ranks and a lack of memory end it too.
    """

    def __init__(self, trainer: Trainer, training: bool) -> None:
        super().__init__(training)
        self._trainer = trainer
        self._failed_names: set[str] = set()

    def compute(self, metric: ResultMetric) -> None:
        """Computes a torchmetrics metric over all ranks. All ranks must call."""
        error: Exception | None = None
        try:
            metric.compute()
        except Exception as raised:
            if self._trainer.sanity_checking or _is_fatal(raised):
                raise
            error = raised
        if not self._has_failed_on_a_rank(metric, error):
            return
        value = torch.tensor(math.nan, device=self._trainer.strategy.root_device)
        metric._computed = value  # type: ignore[assignment]  # Lightning declares None
        name = metric.meta.name
        if name not in self._failed_names:
            self._failed_names.add(name)
            logging.getLogger("rankzero").warning("metric %s", name, exc_info=error)
            cause = "an error on another rank" if error is None else repr(error)
            rank_zero_warn(
                f"rankzero: the metric {name!r} cannot be computed and is NaN in this epoch; training continues: "
                f"{cause}"
            )

    def _has_failed_on_a_rank(self, metric: ResultMetric, error: Exception | None) -> bool:
        """Returns whether `compute` has failed, on any rank if ranks have to agree on the value of the metric."""
        agrees = self._trainer.world_size > 1 and not metric.meta.sync.rank_zero_only
        if not agrees or not getattr(metric.value, "sync_on_compute", False):
            return error is not None
        has_failed: bool = self._trainer.strategy.reduce_boolean_decision(error is not None, all=False)
        return has_failed

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
    def _get_cache(self, result_metric: ResultMetric, on_step: bool) -> Tensor | None:  # type: ignore[override]
        is_due = not on_step and not result_metric.is_tensor and result_metric.meta.on_epoch
        if is_due and result_metric._computed is None:
            self.compute(result_metric)
        cache: Any = super()._get_cache(result_metric, on_step)
        return cache  # type: ignore[no-any-return]
