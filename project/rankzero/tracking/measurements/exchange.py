"""Exchanges the measured values of a logging interval between ranks."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from rankzero.tracking.measurements.series import ALWAYS_EXCHANGED, DETAILS_REQUESTED, EXCHANGED, combine
from rankzero.training.strategies import RunStrategy


class Exchange:
    """One collective per logging interval, and none with a single process.

    A few values are exchanged in every interval. Rank zero requests the others, the details, in one exchange, and all
    ranks add them to the next one. Details are part of the first exchange.

    Args:
        strategy: The Trainer's strategy.
        world_size: Number of processes.
    """

    def __init__(self, strategy: RunStrategy, world_size: int) -> None:
        self._strategy, self._world_size = strategy, world_size
        self._own: dict[str, float | Tensor] = {}
        self._rows: Tensor | None = None
        self._request: float | Tensor = 1.0
        self._copied: torch.cuda.Event | None = None

    @property
    def has_details(self) -> bool:
        """Whether the next exchange has details; waits until the device has run the last one."""
        if self._copied is not None:
            self._copied.synchronize()
        return bool(self._request)

    def gather(self, values: Mapping[str, float | Tensor], has_details: bool) -> None:
        """Gathers the values of all ranks, without waiting for the device. All ranks must call.

        Args:
            values: Values of this rank by tag. The first row decides whether the next exchange has details.
            has_details: The value of `has_details` before this exchange.
        """
        tags = EXCHANGED if has_details else ALWAYS_EXCHANGED
        self._own = {tag: values.get(tag, math.nan) for tag in tags}
        if self._world_size == 1:
            self._request = self._own[DETAILS_REQUESTED]
            return
        row = self._own.values()
        packed = torch.tensor([math.nan if isinstance(value, Tensor) else value for value in row], dtype=torch.float64)
        if self._strategy.root_device.type == "cuda":
            packed = packed.to(self._strategy.root_device)
        for index, value in enumerate(row):
            if isinstance(value, Tensor):
                packed[index] = value
        self._rows = self._strategy.gather_rows(packed)
        self._request = self._rows[0, tags.index(DETAILS_REQUESTED)]
        if self._request.is_cuda:
            on_device, self._copied = self._request, torch.cuda.Event()
            self._request = on_device.new_empty((), device="cpu", pin_memory=True)
            self._request.copy_(on_device, non_blocking=True)
            self._copied.record()

    def rows(self) -> list[list[float]]:
        """Returns the values of each rank in the order of `EXCHANGED`, NaN for missing ones; waits for the device."""
        if self._rows is None:
            return [[float(value) for value in self._own.values()]]
        rows: list[list[float]] = self._rows.tolist()
        return rows

    def combined(self) -> dict[str, float]:
        """Returns the values over all ranks by tag, NaN for missing ones; waits for the device."""
        if self._rows is None:
            return {tag: float(value) for tag, value in self._own.items()}
        return combine(self.rows())
