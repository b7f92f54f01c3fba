"""Reads predictions, targets, images and names of classes from what a step and a data module provide."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

CLASSIFICATION, REGRESSION = 1, 2
"""Kinds of outputs; 0 means that there are none."""

MAX_DEPTH = 4
"""Number of nested containers of a batch that are searched for tensors."""


@dataclass(frozen=True)
class Outputs:
    """Predictions for a batch, and the targets.

    Args:
        kind: `CLASSIFICATION` or `REGRESSION`.
        predictions: float32 logits of shape `(batch, classes)`, or predictions of any shape.
        targets: int64 classes of shape `(batch,)`, or float32 targets of the same shape as the predictions.
    """

    kind: int
    predictions: Tensor
    targets: Tensor


def read_outputs(returned: Any) -> Outputs | None:
    """Returns the documented outputs of a `validation_step`, or None if it has returned anything else."""
    if not isinstance(returned, Mapping):
        return None
    logits, predictions, targets = (returned.get(name) for name in ("logits", "predictions", "targets"))
    if not isinstance(targets, Tensor) or not targets.numel():
        return None
    if isinstance(logits, Tensor) and _are_classes(targets) and _are_logits(logits, len(targets)):
        return Outputs(CLASSIFICATION, logits.detach().float(), targets.detach().to(logits.device).long())
    if isinstance(predictions, Tensor) and predictions.is_floating_point() and targets.is_floating_point():
        if predictions.shape != targets.shape:
            return None
        return Outputs(REGRESSION, predictions.detach().float(), targets.detach().to(predictions.device).float())
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


def _are_logits(logits: Tensor, count: int) -> bool:
    return logits.is_floating_point() and logits.ndim == 2 and len(logits) == count and logits.shape[1] >= 2


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
