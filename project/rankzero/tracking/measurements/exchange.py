"""Exchanges the measured values of a logging interval between ranks."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from rankzero.tracking.measurements.series import ALWAYS_EXCHANGED, DETAILS_REQUESTED, EXCHANGED
from rankzero.training.strategies import GatheredRows, RunStrategy

Row = list[float]


class Exchange:
    """One collective per logging interval, and none with a single process.

    Training continues between `begin` and `finish`. A few values are exchanged in every interval. Rank zero requests
    the others, the details, in one exchange, and all ranks add them to the next one. Details are part of the first
    exchange.

    Args:
        strategy: The Trainer's strategy.
        world_size: Number of processes.

    Attributes:
        is_begun: Whether an exchange has begun and has not been finished.
        has_details: Whether the next exchange has details; known after the last one has been finished.
    """

    def __init__(self, strategy: RunStrategy, world_size: int) -> None:
        self._strategy, self._world_size = strategy, world_size
        self._tags: tuple[str, ...] = ()
        self._own: Row = []
        self._gathered: GatheredRows | None = None
        self.is_begun, self.has_details = False, True

    @property
    def is_complete(self) -> bool:
        """Whether `finish` returns at once."""
        return self._gathered is None or self._gathered.is_complete

    def begin(self, values: Mapping[str, float | Tensor]) -> None:
        """Begins to gather the values of all ranks. All ranks must call, after they have finished the last exchange.

        Args:
            values: Values of this rank by tag. Those of rank zero decide whether the next exchange has details.
        """
        self.is_begun = True
        self._tags = EXCHANGED if self.has_details else ALWAYS_EXCHANGED
        row = [values.get(tag, math.nan) for tag in self._tags]
        # `isinstance(value, Tensor)` takes several times as long as `isinstance(value, float)`.
        on_device = {index: value for index, value in enumerate(row) if not isinstance(value, float)}
        self._own = [value if isinstance(value, float) else math.nan for value in row]
        if self._world_size == 1 and not on_device:
            return
        packed = torch.tensor(self._own, dtype=torch.float64)
        if self._strategy.root_device.type == "cuda":
            packed = packed.pin_memory().to(self._strategy.root_device, non_blocking=True)
        for index, value in on_device.items():
            packed[index] = value
        self._gathered = self._strategy.begin_gather_rows(packed)

    def finish(self) -> list[Row]:
        """Returns the values of each rank in the order of `EXCHANGED`, NaN for missing ones, after they have arrived.

        Without details, the rows end after `ALWAYS_EXCHANGED`.
        """
        rows = [self._own] if self._gathered is None else self._gathered.wait().tolist()
        self._gathered, self.is_begun = None, False
        self.has_details = bool(rows[0][self._tags.index(DETAILS_REQUESTED)])
        return rows
