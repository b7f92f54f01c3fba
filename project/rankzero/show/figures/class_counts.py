"""Counts of a classification that can be summed over ranks: confusion matrix and precision-recall curves."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rankzero.training.strategies import RunStrategy

THRESHOLDS = 100
"""Number of thresholds of a precision-recall curve, from 0 to 1; TensorBoard accepts at most 127."""

MAX_CURVES = 10
"""Largest number of classes that have their own precision-recall curves."""

MAX_MATRIX_CLASSES = 2_000
"""Largest number of classes for a confusion matrix, which then has 32 MB."""

IGNORED_TARGET = -100
"""Target of samples that torch's cross-entropy ignores by default."""


@dataclass(frozen=True)
class Curve:
    """Precision-recall curve: one value per threshold, in ascending order of thresholds."""

    true_positives: Tensor
    false_positives: Tensor
    true_negatives: Tensor
    false_negatives: Tensor

    @property
    def precision(self) -> Tensor:
        """Precision; 0 where no sample reaches the threshold."""
        return self.true_positives / (self.true_positives + self.false_positives).clamp(min=1)

    @property
    def recall(self) -> Tensor:
        """Recall; 0 without positive samples."""
        return self.true_positives / (self.true_positives + self.false_negatives).clamp(min=1)

    @property
    def positives(self) -> int:
        """Number of positive samples."""
        return int(self.true_positives[0] + self.false_negatives[0])


class ClassCounts:
    """Counts of a classification.

    The counts equal the states of torchmetrics' `MulticlassConfusionMatrix` and
    `MulticlassPrecisionRecallCurve(thresholds=100)`. For ten classes, torchmetrics (1.9) takes seven times as long,
    because it compares each probability with each threshold; and it cannot update a micro average of more classes.
    """

    def __init__(self, classes: int, device: torch.device | str = "cpu") -> None:
        self.classes = classes
        side = classes if classes <= MAX_MATRIX_CLASSES else 0
        self.matrix = torch.zeros(side, side, dtype=torch.int64, device=device)
        """Number of samples by true class and predicted class; empty with too many classes."""
        self.samples = torch.zeros(classes, dtype=torch.int64, device=device)
        """Number of samples by true class."""
        self.correct = torch.zeros(classes, dtype=torch.int64, device=device)
        """Number of correctly predicted samples by true class."""
        curves = classes if classes <= MAX_CURVES else 1
        self._bins = torch.zeros(curves, 2, THRESHOLDS, dtype=torch.int64, device=device)
        self._thresholds = torch.linspace(0, 1, THRESHOLDS, device=device)
        self._least = self._largest = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Counts logits of shape `(batch, classes)` without those of `IGNORED_TARGET`; does not wait for a GPU.

        Returns:
            The targets, with classes in place of targets that are none, for which `target_error` returns an error.
        """
        is_counted = targets != IGNORED_TARGET
        ones = is_counted.long()
        targets = targets * ones
        self._least = torch.minimum(self._least, targets.min())
        self._largest = torch.maximum(self._largest, targets.max())
        targets = targets.clamp(0, self.classes - 1)
        predicted = logits.argmax(1)
        if self.matrix.numel():
            self.matrix.view(-1).scatter_add_(0, targets * self.classes + predicted, ones)
        self.samples.scatter_add_(0, targets, ones)
        self.correct.scatter_add_(0, targets, ones * (predicted == targets))
        self._add_probabilities(logits.softmax(1), targets, ones)
        return targets.masked_fill(~is_counted, IGNORED_TARGET)

    def _add_probabilities(self, probabilities: Tensor, targets: Tensor, ones: Tensor) -> None:
        """Counts the probabilities by curve, by whether they are those of the true class, and by threshold."""
        cells = torch.searchsorted(self._thresholds, probabilities.contiguous(), right=True).sub_(1)
        cells.clamp_(0, THRESHOLDS - 1)
        cells.scatter_add_(1, targets[:, None], torch.full_like(targets[:, None], THRESHOLDS))
        if len(self._bins) > 1:
            cells += torch.arange(self.classes, device=cells.device) * (2 * THRESHOLDS)
        self._bins.view(-1).scatter_add_(0, cells.flatten(), ones.repeat_interleave(self.classes))

    def target_error(self) -> ValueError | None:
        """Returns an error if a target is no class."""
        least, largest = int(self._least), int(self._largest)
        is_wrong = least < 0 or largest >= self.classes
        return ValueError(f"targets are {least} to {largest} for {self.classes} classes") if is_wrong else None

    @property
    def curves(self) -> list[Curve]:
        """The curve of each class; none with too many classes."""
        return [_curve(bins) for bins in self._bins] if len(self._bins) > 1 else []

    @property
    def micro_average(self) -> Curve:
        """The curve of all pairs of a sample and a class."""
        return _curve(self._bins.sum(0))

    def add_other_ranks(self, strategy: RunStrategy) -> None:
        """Adds the counts of all other ranks, and moves the counts to the CPU. All ranks must call."""
        for name in ("matrix", "samples", "correct", "_bins"):
            counts = getattr(self, name).to(strategy.root_device)
            strategy.sum_in_place(counts)
            setattr(self, name, counts.cpu())


def _curve(bins: Tensor) -> Curve:
    """Returns the curve of negative and positive samples, counted by the largest threshold that they reach."""
    false_positives, true_positives = bins.flip(1).cumsum(1).flip(1)
    negatives, positives = bins.sum(1)
    return Curve(true_positives, false_positives, negatives - false_positives, positives - true_positives)
