"""Errors of a user's torchmetrics metrics at the end of an epoch, which do not end training."""

import logging
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor


class TolerantResults(_ResultCollection):
    """Lightning's result collection, which omits a torchmetrics metric whose `compute` raises an error.

    In Lightning (2.6), such an error ends training, although only one value is missing. Here, it ends the run only in
    the validation before training, which exists to find mistakes early.

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
            if self._trainer.sanity_checking:
                raise
            metric.has_reset = True  # there is no value until it is logged again
            name = metric.meta.name
            if name not in self._failed_names:
                self._failed_names.add(name)
                logging.getLogger("rankzero").warning("metric %s", name, exc_info=True)
                rank_zero_warn(
                    f"rankzero: the metric {name!r} cannot be computed and is missing in this epoch; training "
                    f"continues: {error!r}"
                )

    # A static method in Lightning, which calls it on the instance.
    def _get_cache(self, result_metric: _ResultMetric, on_step: bool) -> Tensor | None:  # type: ignore[override]
        if not on_step and not result_metric.is_tensor and result_metric.meta.on_epoch:
            if result_metric._computed is None:
                self.compute(result_metric)
            if result_metric.has_reset:
                return None
        cache: Any = super()._get_cache(result_metric, on_step)
        return cache  # type: ignore[no-any-return]


def compute_metric(results: _ResultCollection, metric: _ResultMetric) -> None:
    """Computes a torchmetrics metric of a result collection over all ranks. All ranks must call."""
    if isinstance(results, TolerantResults):
        results.compute(metric)
    else:
        metric.compute()
