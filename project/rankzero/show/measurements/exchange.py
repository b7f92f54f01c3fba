"""Exchange of the measured values between ranks."""

import math
from collections.abc import Mapping, Sequence
from math import isnan, nan

import torch
from torch import Tensor

from rankzero.distributed.devices import GatheredRows, moved
from rankzero.distributed.monitoring.hangs import ranks_text
from rankzero.show.report.curves import DATA_WAIT, FIRST_GRADIENT, GRADIENT_NORM, SERIES
from rankzero.training.strategies import RunStrategy

RANK_SERIES = {DATA_WAIT: "world/data_wait_ms", FIRST_GRADIENT: FIRST_GRADIENT}
"""Tag of a value -> tag under which the values of single ranks are logged."""

LOSS_SUM, LOSS_SAMPLES = "loss_sum", "loss_samples"
"""Values of a rank from which `train/loss` is computed; not logged themselves."""

BROKEN_AT = "broken_at"
"""Step in which a loss of the rank was first NaN or infinite; not logged."""

DETAILS_REQUESTED = "details_requested"
"""1 if rank zero requests details in the next exchange; not logged."""

ALWAYS_EXCHANGED = (LOSS_SUM, LOSS_SAMPLES, BROKEN_AT, DETAILS_REQUESTED, GRADIENT_NORM)
"""Tags of the values that ranks exchange at every logging step; the others are details."""

REDUCTIONS = dict(zip(ALWAYS_EXCHANGED, ("sum", "sum", "max", "max", "max"), strict=True)) | {
    tag: series.reduction for tag, series in SERIES.items() if series.reduction
}
"""Tag of each value that ranks exchange -> how the values of ranks are combined."""

EXCHANGED = tuple(REDUCTIONS)
"""Tags of the values that ranks exchange, in this order."""

MAX_RANKS = 16
"""Largest number of ranks with a series of their own; of more ranks, the slowest ones are logged."""


def combine(rows: Sequence[Sequence[float]]) -> dict[str, float]:
    """Returns the values over all ranks, by tag; NaN if no rank has a value.

    Args:
        rows: Values of each rank, in the order of `EXCHANGED`; the last ones may be missing. NaN is a value that a rank
            does not have, except for the sum of losses.
    """
    if len(rows) == 1:
        return dict(zip(EXCHANGED, rows[0], strict=False))
    combined = {}
    for (tag, reduction), column in zip(REDUCTIONS.items(), zip(*rows, strict=True), strict=False):
        values = column if tag == LOSS_SUM else [value for value in column if not isnan(value)]
        if not values:
            combined[tag] = nan
        elif reduction == "max":
            combined[tag] = max(values)
        else:
            combined[tag] = sum(values) / (len(values) if reduction == "mean" else 1)
    return combined


def first_broken(rows: Sequence[Sequence[float]]) -> str:
    """Returns in which step and on which rank the loss was first NaN or infinite, as text; empty if that is unknown."""
    steps = [row[EXCHANGED.index(BROKEN_AT)] for row in rows]
    first = min((step for step in steps if not isnan(step)), default=nan)
    if isnan(first):  # on a GPU, a rank knows only the sum of the interval
        ranks = [rank for rank, row in enumerate(rows) if not math.isfinite(row[EXCHANGED.index(LOSS_SUM)])]
    else:
        ranks = [rank for rank, step in enumerate(steps) if step == first]
    where = f" in step {first:,.0f}" * (not isnan(first)) + f" on {ranks_text(ranks)}" * (0 < len(ranks) < len(rows))
    return f"first{where}" if where else ""


def values_of_ranks(rows: Sequence[Sequence[float]], slow_ranks: Sequence[int]) -> dict[str, float]:
    """Returns values of single ranks in one group per chart, and those of slow ranks a second time, as marks."""
    values: dict[str, float] = {}
    for tag, group in RANK_SERIES.items():
        column = [row[EXCHANGED.index(tag)] for row in rows]
        ranks = [rank for rank, value in enumerate(column) if not isnan(value)]
        slowest = sorted(ranks, key=lambda rank: column[rank], reverse=True)[:MAX_RANKS]
        values |= {f"{group}/rank_{rank:03d}": column[rank] for rank in sorted(slowest)}
        if group == FIRST_GRADIENT:
            values |= {f"{group}/slow_rank_{rank:03d}": column[rank] for rank in slow_ranks if rank in slowest}
    return values


class Exchange:
    """One collective per logging interval, and none with a single process.

    Training continues between `begin` and `finish`. A few values are exchanged in every interval. Rank zero requests
    the others, the details, in one exchange, and all ranks add them to the next one. Details are part of the first
    exchange.

    Attributes:
        is_begun: Whether an exchange has begun and has not been finished.
        has_details: Whether the next exchange has details; known after the last one has been finished.
    """

    def __init__(self, strategy: RunStrategy, world_size: int) -> None:
        self._strategy, self._world_size = strategy, world_size
        self._tags: tuple[str, ...] = ()
        self._own: list[float] = []
        self._gathered: GatheredRows | None = None
        self.is_begun, self.has_details = False, True

    @property
    def is_complete(self) -> bool:
        """Whether `finish` returns at once."""
        return self._gathered is None or self._gathered.is_complete

    def begin(self, values: Mapping[str, float | Tensor]) -> None:
        """Begins to gather the values of all ranks. All ranks must call, after they have finished the last exchange.

        Those of rank zero decide whether the next exchange has details.
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
        if self._strategy.root_device.type == "cuda":  # MPS has no float64
            packed = moved(packed, self._strategy.root_device)
        for index, value in on_device.items():
            packed[index] = value
        self._gathered = self._strategy.begin_gather_rows(packed)

    def finish(self) -> list[list[float]]:
        """Returns the values of each rank in the order of `EXCHANGED`, NaN for missing ones, after they have arrived.

        Without details, the rows end after `ALWAYS_EXCHANGED`.
        """
        rows = [self._own] if self._gathered is None else self._gathered.wait().tolist()
        self._gathered, self.is_begun = None, False
        self.has_details = bool(rows[0][self._tags.index(DETAILS_REQUESTED)])
        return rows
