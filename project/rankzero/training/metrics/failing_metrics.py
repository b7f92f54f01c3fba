"""Errors of a user's torchmetrics metrics at the end of an epoch, which do not end training."""

import logging
import math
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from rankzero.messages import is_peer_failure


class TolerantResults(_ResultCollection):
    """Lightning's result collection, in which a torchmetrics metric whose `compute` raises an error is NaN.

    In Lightning (2.6), such an error ends training, although only one value is missing. Here, it ends the run only in
    the validation before training, which exists to find mistakes early. Lost ranks and a lack of memory end it too.

    Args:
        trainer: The trainer.
        training: Whether the values are those of training, not of a validation.
    """

    def __init__(self, trainer: Trainer, training: bool) -> None:
        super().__init__(training)
        self._trainer = trainer
        self._failed_names: set[str] = set()

    def compute(self, metric: _ResultMetric) -> None:
        """Computes a torchmetrics metric over all ranks. All ranks must call."""
        try:
            metric.compute()
        except Exception as error:
            # torchmetrics exchanges the state of the metric between ranks within `compute`.
            is_fatal = isinstance(error, torch.distributed.DistError | torch.OutOfMemoryError) or is_peer_failure(error)
            if self._trainer.sanity_checking or is_fatal:
                raise
            value = torch.tensor(math.nan, device=self._trainer.strategy.root_device)
            metric._computed = value  # type: ignore[assignment]  # Lightning declares None
            name = metric.meta.name
            if name not in self._failed_names:
                self._failed_names.add(name)
                logging.getLogger("rankzero").warning("metric %s", name, exc_info=True)
                rank_zero_warn(
                    f"rankzero: the metric {name!r} cannot be computed and is NaN in this epoch; training continues: "
                    f"{error!r}"
                )

    # A static method in Lightning, which calls it on the instance.
    def _get_cache(self, result_metric: _ResultMetric, on_step: bool) -> Tensor | None:  # type: ignore[override]
        is_due = not on_step and not result_metric.is_tensor and result_metric.meta.on_epoch
        if is_due and result_metric._computed is None:
            self.compute(result_metric)
        cache: Any = super()._get_cache(result_metric, on_step)
        return cache  # type: ignore[no-any-return]


def compute_metric(results: _ResultCollection, metric: _ResultMetric) -> None:
    """Computes a torchmetrics metric of a result collection over all ranks. All ranks must call."""
    if isinstance(results, TolerantResults):
        results.compute(metric)
    else:
        metric.compute()
