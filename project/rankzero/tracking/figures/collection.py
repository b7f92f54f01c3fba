"""What one rank collects during a validation that is drawn, and its exchange between ranks."""

import logging
from dataclasses import dataclass
from typing import Any

import torch

from rankzero.tracking.figures.class_counts import ClassCounts
from rankzero.tracking.figures.outputs import CLASSIFICATION, REGRESSION, find_images, read_outputs
from rankzero.tracking.figures.value_pairs import Pairs, PairSelection
from rankzero.tracking.figures.worst_samples import WorstSample, WorstSamples
from rankzero.training.strategies import RunStrategy

_NO_OUTPUTS = 0


class CollectionError(Exception):
    """Some rank could not collect its outputs, or ranks have different outputs; raised on all ranks."""


@dataclass(frozen=True)
class Validation:
    """Outputs of a validation on all ranks.

    Args:
        counts: Counts of a classification; None for a regression.
        worst: The samples with the largest losses; none without images.
        pairs: Predicted and true values of a regression; None for a classification.
    """

    counts: ClassCounts | None = None
    worst: tuple[WorstSample, ...] = ()
    pairs: Pairs | None = None


class Collection:
    """Collects the outputs of a validation on one rank.

    Args:
        ranks: Number of ranks.
        rank: This rank.

    Attributes:
        error: The error that has ended the collection; None without one.
    """

    def __init__(self, ranks: int, rank: int) -> None:
        self.ranks, self.rank = ranks, rank
        self.error: Exception | None = None
        self._kind = _NO_OUTPUTS
        self._counts: ClassCounts | None = None
        self._worst, self._pairs = WorstSamples(), PairSelection(ranks, rank)

    def add(self, returned: Any, batch: Any) -> None:
        """Adds a batch; after an error, further batches are ignored.

        Args:
            returned: What `validation_step` has returned.
            batch: The batch.
        """
        if self.error is None:
            try:
                self._add(returned, batch)
            except Exception as error:
                self.error = error

    def _add(self, returned: Any, batch: Any) -> None:
        outputs = read_outputs(returned)
        if outputs is None:
            return
        if self._kind not in (_NO_OUTPUTS, outputs.kind):
            raise ValueError("validation_step has returned logits for some batches and predictions for others")
        self._kind = outputs.kind
        predictions, targets = outputs.predictions, outputs.targets
        if outputs.kind == REGRESSION:
            self._pairs.add(predictions, targets)
            return
        classes = predictions.shape[1]
        self._counts = self._counts or ClassCounts(classes, predictions.device)
        if self._counts.classes != classes:
            raise ValueError(f"validation_step has returned logits for {self._counts.classes} and {classes} classes")
        self._counts.add(predictions, targets)
        self._worst.add(predictions, targets, find_images(batch, len(targets)))

    def exchange(self, strategy: RunStrategy) -> Validation | None:
        """Returns the outputs of all ranks; None if no rank has any. All ranks must call.

        Raises:
            CollectionError: There are outputs that cannot be combined; raised on all ranks.
        """
        if self.error is not None:
            logging.getLogger("rankzero").warning("figures: %r", self.error)
        classes = self._counts.classes if self._counts else 0
        status = [int(self.error is not None), self._kind, classes, *self._worst.shape]
        rows = strategy.gather_rows(torch.tensor(status)).tolist()
        failed = [rank for rank, row in enumerate(rows) if row[0]]
        if failed:
            reason = repr(self.error) if self.rank == failed[0] else f"see logs/rank-{failed[0]:03d}.log"
            raise CollectionError(f"rank {failed[0]} could not collect the outputs of validation_step: {reason}")
        with_outputs = [row[1:] for row in rows if row[1]]
        if not with_outputs:
            return None
        if len({(kind, count) for kind, count, *_ in with_outputs}) > 1:
            kinds = sorted({f"{count} classes" if count else "predictions" for _, count, *_ in with_outputs})
            raise CollectionError(f"validation_step has returned {' and '.join(kinds)} on different ranks")
        kind, classes, *_ = with_outputs[0]
        if kind != CLASSIFICATION:
            return Validation(pairs=PairSelection.gather(strategy, self._pairs.row()))
        counts = self._counts or ClassCounts(classes)
        counts.add_other_ranks(strategy)
        shapes = {tuple(shape) for _, _, *shape in with_outputs}
        worst: list[WorstSample] = []
        if len(shapes) == 1 and all(shape := shapes.pop()):
            worst = self._worst.gather(strategy, self.rank, shape)
        return Validation(counts, tuple(worst))
