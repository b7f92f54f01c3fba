"""A random selection of the predictions and targets of a regression."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rankzero.training.strategies import RunStrategy

MAX_PAIRS = 2_000
"""Largest number of pairs over all ranks."""


@dataclass(frozen=True)
class Pairs:
    """Predicted and true values.

    Args:
        predicted: float64 tensor of shape `(pairs,)`.
        true: float64 tensor of the same shape.
        total: Number of pairs from which these were selected.
    """

    predicted: Tensor
    true: Tensor
    total: int


class PairSelection:
    """Keeps a random selection of this rank's pairs, with its own random numbers.

    Args:
        ranks: Number of ranks, each of which keeps an equal part of `MAX_PAIRS`.
        rank: This rank.
    """

    def __init__(self, ranks: int, rank: int) -> None:
        self.limit = math.ceil(MAX_PAIRS / ranks)
        self._generator = torch.Generator().manual_seed(rank)
        self._kept = torch.zeros(3, 0, dtype=torch.float64)
        self._total = 0

    def add(self, predictions: Tensor, targets: Tensor) -> None:
        """Adds a batch of predictions and targets of equal shape."""
        keys = torch.rand(predictions.numel(), generator=self._generator, dtype=torch.float64)
        self._total += len(keys)
        smallest, positions = keys.topk(min(self.limit, len(keys)), largest=False)
        chosen = positions.to(predictions.device)
        values = [values.flatten()[chosen].cpu().double() for values in (predictions, targets)]
        kept = torch.cat([self._kept, torch.stack([smallest, *values])], 1)
        self._kept = kept[:, kept[0].argsort()[: self.limit]]

    def row(self) -> Tensor:
        """Returns the pairs as one float64 row of fixed length."""
        count = self._kept.shape[1]
        pairs = torch.zeros(2, self.limit, dtype=torch.float64)
        pairs[:, :count] = self._kept[1:]
        return torch.cat([torch.tensor([self._total, count], dtype=torch.float64), pairs.flatten()])

    @staticmethod
    def gather(strategy: RunStrategy, row: Tensor) -> Pairs:
        """Returns the pairs of all ranks. All ranks must call.

        Args:
            strategy: Exchanges values between ranks.
            row: Result of `row`.
        """
        rows = strategy.gather_rows(row)
        parts = [row[2:].view(2, -1)[:, : int(row[1])] for row in rows]
        predicted, true = torch.cat(parts, 1)[:, :MAX_PAIRS]
        return Pairs(predicted, true, int(rows[:, 0].sum()))
