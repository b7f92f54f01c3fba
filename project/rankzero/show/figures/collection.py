"""What one rank reads from the outputs of a validation that is drawn, and its exchange between ranks."""

import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.nn import functional as F

from rankzero.distributed.devices import moved
from rankzero.show.figures.class_counts import IGNORED_TARGET, ClassCounts
from rankzero.training.strategies import RunStrategy

NO_OUTPUTS, CLASSIFICATION, REGRESSION = range(3)
"""Kinds of outputs."""

MAX_DEPTH = 4
"""Number of nested containers of a batch that are searched for tensors."""


def read_outputs(returned: Any) -> tuple[int, Tensor, Tensor] | None:
    """Returns the documented outputs of a `validation_step`, or None if it has returned anything else.

    They are `CLASSIFICATION` with float32 logits of shape `(batch, classes)` and int64 targets, or `REGRESSION` with
    float32 predictions and targets of any shape.
    """
    if not isinstance(returned, Mapping):
        return None
    found: list[Any] = [returned.get(name) for name in ("logits", "predictions", "targets")]
    logits, predictions, targets = found
    if not isinstance(targets, Tensor) or not targets.numel():
        return None
    has_logits = isinstance(logits, Tensor) and logits.is_floating_point() and logits.ndim == 2
    if has_logits and logits.shape[1] >= 2 and _are_classes(targets) and len(logits) == len(targets):
        return CLASSIFICATION, logits.detach().float(), targets.detach().to(logits.device).long()
    has_values = isinstance(predictions, Tensor) and predictions.is_floating_point() and targets.is_floating_point()
    if has_values and predictions.shape == targets.shape:
        return REGRESSION, predictions.detach().float(), targets.detach().to(predictions.device).float()
    return None


def find_images(batch: Any, count: int | None = None) -> Tensor | None:
    """Returns the first tensor of a batch that contains images, of shape `(batch, 1 or 3, height, width)`."""
    for tensor in _tensors(batch):
        has_image_type = tensor.is_floating_point() or tensor.dtype == torch.uint8
        if has_image_type and tensor.ndim == 4 and tensor.shape[1] in (1, 3) and min(tensor.shape) > 0:
            return tensor.detach() if count in (None, len(tensor)) else None
    return None


def find_classes(batch: Any, count: int) -> Tensor | None:
    """Returns the first tensor of a batch that contains one integer per sample."""
    return next((tensor.detach() for tensor in _tensors(batch) if _are_classes(tensor) and len(tensor) == count), None)


def _are_classes(targets: Tensor) -> bool:
    is_integer = not (targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool)
    return is_integer and targets.ndim == 1


def _tensors(batch: Any, depth: int = 0) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping | list | tuple) and depth < MAX_DEPTH:
        for item in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(item, depth + 1)


MAX_WRAPPERS = 10
"""Number of nested data sets (such as torch's `Subset`) that are searched for names."""


def class_names(trainer: Trainer, classes: int | None) -> list[str]:
    """Returns the name of each class; without known names, the numbers of the classes.

    The names are the data module's attribute `class_names`, or else the attribute `classes` of a data set.
    """
    for names in _candidates(trainer):
        if isinstance(names, Iterable) and not isinstance(names, str | bytes):
            cleaned = [" ".join(str(name).split()) for name in names]
            if classes is None or len(cleaned) == classes:
                return cleaned
    return [str(number) for number in range(classes or 0)]


def tags_of(names: Iterable[str]) -> list[str]:
    """Returns distinct names that can be the last part of a tag in TensorBoard."""
    tags: list[str] = []
    for number, name in enumerate(names):
        tag = re.sub(r"[^-\w. ]", "_", name).strip()[:60]
        tags.append(tag if tag and tag not in tags else f"{tag}_{number}".strip("_"))
    return tags


def _candidates(trainer: Trainer) -> Iterator[Any]:
    yield getattr(trainer.datamodule, "class_names", None)  # type: ignore[attr-defined]
    for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop):
        combined = loop._combined_loader
        for loader in combined.flattened if combined is not None else []:
            dataset = getattr(loader, "dataset", None)
            for _ in range(MAX_WRAPPERS):
                yield getattr(dataset, "classes", None)
                parts = getattr(dataset, "datasets", None)  # torch's ConcatDataset
                dataset = parts[0] if isinstance(parts, list | tuple) and parts else getattr(dataset, "dataset", None)


MAX_PAIRS = 2_000
"""Largest number of pairs over all ranks."""


@dataclass(frozen=True)
class Pairs:
    """Predicted and true values, as float64 vectors, selected from a total number of pairs."""

    predicted: Tensor
    true: Tensor
    total: int


class PairSelection:
    """Keeps a random selection of this rank's pairs, with its own random numbers."""

    def __init__(self, ranks: int, rank: int) -> None:
        self.limit = math.ceil(MAX_PAIRS / ranks)
        self._generator = torch.Generator().manual_seed(rank)
        self._kept = torch.zeros(3, 0, dtype=torch.float64)
        self._total = 0

    def add(self, predictions: Tensor, targets: Tensor) -> None:
        """Adds a batch of predictions and targets of equal shape; does not wait for a GPU."""
        keys = torch.rand(predictions.numel(), generator=self._generator, dtype=torch.float64)
        self._total += len(keys)
        device = predictions.device if predictions.is_cuda else keys.device  # others may not have float64
        smallest, chosen = moved(keys, device).topk(min(self.limit, len(keys)), largest=False)
        values = [values.flatten().to(device)[chosen].double() for values in (predictions, targets)]
        kept = self._kept if self._kept.numel() else smallest.new_empty(3, 0)
        kept = torch.cat([kept, torch.stack([smallest, *values])], 1)
        self._kept = kept[:, kept[0].argsort()[: self.limit]]

    def gather(self, strategy: RunStrategy) -> Pairs:
        """Returns the pairs of all ranks. All ranks must call."""
        count = self._kept.shape[1]
        pairs = torch.zeros(2, self.limit, dtype=torch.float64)
        pairs[:, :count] = self._kept[1:].cpu()
        row = torch.cat([torch.tensor([self._total, count], dtype=torch.float64), pairs.flatten()])  # of fixed length
        rows = strategy.begin_gather_rows(row).wait()
        parts = [row[2:].view(2, -1)[:, : int(row[1])] for row in rows]
        predicted, true = torch.cat(parts, 1)[:, :MAX_PAIRS]
        return Pairs(predicted, true, int(rows[:, 0].sum()))


MAX_SAMPLES = 16
MAX_PIXELS = 96
"""Largest side of a stored image."""

_NO_SAMPLE = -1.0
"""Loss in the row of a rank that has fewer samples."""


@dataclass(frozen=True)
class WorstSample:
    """Sample with a large loss, with its image of shape `(channels, height, width)`."""

    loss: float
    predicted: int
    true: int
    image: Tensor


class WorstSamples:
    """Keeps the samples of this rank with the largest cross-entropy, if all images have the same shape.

    Attributes:
        shape: Shape of the images: channels, height and width; zeros if there are no usable images.
    """

    def __init__(self) -> None:
        self.shape = (0, 0, 0)
        self._is_usable = True
        self._rows, self._images = torch.empty(0, 3), torch.empty(0)

    def add(self, logits: Tensor, targets: Tensor, images: Tensor | None) -> None:
        """Adds logits of shape `(batch, classes)`, their targets and, if any, their images; does not wait for a GPU."""
        shape = (0, 0, 0) if images is None else stored_shape(images)
        is_first = self.shape == (0, 0, 0)
        if not self._is_usable or images is None or not (is_first or self.shape == shape):
            self._is_usable, self.shape = False, (0, 0, 0)
            self._rows = self._rows[:0]
            return
        self.shape = shape
        losses = F.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORED_TARGET)
        losses = losses.nan_to_num(nan=torch.inf, posinf=torch.inf).masked_fill(targets == IGNORED_TARGET, _NO_SAMPLE)
        losses, positions = losses.topk(min(MAX_SAMPLES, len(losses)))
        if losses.is_cpu and len(self._rows) == MAX_SAMPLES:
            count = int((losses > self._rows[-1, 0]).sum())
            if not count:
                return
            losses, positions = losses[:count], positions[:count]
        rows = torch.stack([losses, logits[positions].argmax(1).to(losses), targets[positions].to(losses)], 1)
        kept = downscaled(images[positions.to(images.device)])
        if not is_first:
            rows, kept = torch.cat([self._rows, rows]), torch.cat([self._images, kept])
        worst = rows[:, 0].topk(min(MAX_SAMPLES, len(rows))).indices
        self._rows, self._images = rows[worst], kept[worst.to(kept.device)]

    def gather(self, strategy: RunStrategy, rank: int, shape: tuple[int, int, int]) -> list[WorstSample]:
        """Returns the worst samples of all ranks, the worst one first. All ranks must call."""
        row = torch.full((MAX_SAMPLES, 3), _NO_SAMPLE, dtype=torch.float64)  # loss, predicted and true class of each
        row[: len(self._rows)] = self._rows.cpu()
        rows = strategy.begin_gather_rows(row.flatten()).wait().view(-1, MAX_SAMPLES, 3).tolist()
        found = [(*values, owner, number) for owner, row in enumerate(rows) for number, values in enumerate(row)]
        winners = sorted((entry for entry in found if entry[0] >= 0), key=lambda entry: -entry[0])[:MAX_SAMPLES]
        images = torch.zeros(len(winners), *shape)
        for place, (_, _, _, owner, number) in enumerate(winners):
            if owner == rank:
                images[place] = self._images[number].cpu()
        if winners:
            images = images.to(strategy.root_device)
            strategy.sum_in_place(images)
        return [
            WorstSample(loss, int(predicted), int(true), image)
            for (loss, predicted, true, _, _), image in zip(winners, images.cpu(), strict=True)
        ]


def stored_shape(images: Tensor) -> tuple[int, int, int]:
    """Returns channels, height and width of images after `downscaled`."""
    channels, *sides = images.shape[1:]
    height, width = (max(1, round(side * min(1.0, MAX_PIXELS / max(sides)))) for side in sides)
    return channels, height, width


def downscaled(images: Tensor) -> Tensor:
    """Returns images of at most `MAX_PIXELS` pixels in height and width, as finite float32."""
    _, height, width = stored_shape(images)
    pixels = images.detach().float().nan_to_num()
    if (height, width) != tuple(images.shape[2:]):
        pixels = F.adaptive_avg_pool2d(pixels, (height, width))
    return pixels


class CollectionError(Exception):
    """Some rank could not collect its outputs, or ranks have different outputs; raised on all ranks."""


@dataclass(frozen=True)
class Validation:
    """Outputs of a validation on all ranks."""

    counts: ClassCounts | None = None
    worst: tuple[WorstSample, ...] = ()
    pairs: Pairs | None = None


class Collection:
    """Collects the outputs of a validation on one rank, until an error has ended the collection."""

    def __init__(self, ranks: int, rank: int) -> None:
        self.ranks, self.rank = ranks, rank
        self.error: Exception | None = None
        self._kind = NO_OUTPUTS
        self._counts: ClassCounts | None = None
        self._worst, self._pairs = WorstSamples(), PairSelection(ranks, rank)

    def add(self, returned: Any, batch: Any) -> None:
        """Adds a batch; after an error, further batches are ignored."""
        if self.error is None:
            try:
                self._add(returned, batch)
            except Exception as error:
                self.error = error

    def _add(self, returned: Any, batch: Any) -> None:
        outputs = read_outputs(returned)
        if outputs is None:
            return
        kind, predictions, targets = outputs
        if self._kind not in (NO_OUTPUTS, kind):
            raise ValueError("validation_step has returned logits for some batches and predictions for others")
        self._kind = kind
        if kind == REGRESSION:
            self._pairs.add(predictions, targets)
            return
        classes = predictions.shape[1]
        self._counts = self._counts or ClassCounts(classes, predictions.device)
        if self._counts.classes != classes:
            raise ValueError(f"validation_step has returned logits for {self._counts.classes} and {classes} classes")
        targets = self._counts.add(predictions, targets)
        self._worst.add(predictions, targets, find_images(batch, len(targets)))

    def exchange(self, strategy: RunStrategy) -> Validation | None:
        """Returns the outputs of all ranks; None if no rank has any. All ranks must call.

        Raises:
            CollectionError: There are outputs that cannot be combined; raised on all ranks.
        """
        if self.error is None and self._counts is not None:
            self.error = self._counts.target_error()
        if self.error is not None:
            logging.getLogger("rankzero").warning("figures: %r", self.error)
        classes = self._counts.classes if self._counts else 0
        status = [int(self.error is not None), self._kind, classes, *self._worst.shape]
        rows = strategy.begin_gather_rows(torch.tensor(status)).wait().tolist()
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
            return Validation(pairs=self._pairs.gather(strategy))
        counts = self._counts or ClassCounts(classes)
        counts.add_other_ranks(strategy)
        shapes = {tuple(shape) for _, _, *shape in with_outputs}
        worst: list[WorstSample] = []
        if len(shapes) == 1 and all(shape := shapes.pop()):
            worst = self._worst.gather(strategy, self.rank, shape)
        return Validation(counts, tuple(worst))
