"""Finds the number of samples in a batch."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any

from torch import Tensor

_MAX_ITEMS = 100
"""Number of items of a container that are searched; a list of a million numbers contains no tensor."""


def batch_size(batch: Any) -> int | None:
    """Returns the number of samples in a batch, or None if it is unknown.

    This is the length of the first tensor, as in Lightning's `extract_batch_size`, or of the first array. Unlike that
    function, it reads no elements of arrays and no iterators, and raises no errors of user-defined containers.

    Args:
        batch: A tensor or array of shape `(samples, ...)`, or containers of those.
    """
    first = batch[0] if type(batch) in (list, tuple) and batch else batch
    if type(first) is Tensor and (shape := first.shape):  # most batches, without generators
        return shape[0] or 1
    try:
        return next(_lengths(batch), None)
    except Exception:
        return None


def _lengths(batch: Any) -> Iterator[int]:
    if isinstance(batch, Tensor) or isinstance(getattr(batch, "shape", None), tuple):
        yield (batch.shape[0] if len(batch.shape) else 1) or 1
    elif isinstance(batch, Mapping):
        for value in islice(batch.values(), _MAX_ITEMS):
            yield from _lengths(value)
    elif is_dataclass(batch) and not isinstance(batch, type):
        for field in fields(batch):
            yield from _lengths(getattr(batch, field.name))
    elif isinstance(batch, Iterable) and not isinstance(batch, str | bytes | Iterator):
        for item in islice(batch, _MAX_ITEMS):
            yield from _lengths(item)
