"""Names of the classes of a data set."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from lightning.pytorch import Trainer

MAX_WRAPPERS = 10
"""Number of nested data sets (such as torch's `Subset`) that are searched for names."""


def class_names(trainer: Trainer, classes: int | None) -> list[str]:
    """Returns the name of each class; without known names, the numbers of the classes.

    The names are the data module's attribute `class_names`, or else the attribute `classes` of a data set.

    Args:
        trainer: The Trainer, for its data module and loaders.
        classes: Number of classes; None if it is not known.
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
