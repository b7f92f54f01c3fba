"""Collects the outputs of `predict_step` from all ranks in one file, in the order of the samples.

Each rank writes the outputs of a few batches at a time to part files; rank zero reads the parts one after the other.
A rank therefore keeps about `PART_BYTES` in memory, and rank zero one memory-mapped copy of the result.
"""

import csv
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rankzero.messages import RequestError
from rankzero.runs.checkpoints.atomic_files import replacing, synced

PART_BYTES = 64 * 2**20
"""Bytes of outputs after which a rank writes a part, and size from which a merged tensor is memory-mapped."""

MOST_COLUMNS = 64
"""Maximum number of columns of the CSV table; wider predictions get no table."""

PLAIN = (str, int, float, bool, type(None))


class PartWriter:
    """Writes the outputs of one rank for one data loader to part files.

    Args:
        folder: Folder for the parts.
        rank: The rank.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.batches: list[tuple[list[int], Any]] = []
        self.held = self.parts = 0

    def add(self, samples: Sequence[int], output: Any) -> None:
        """Adds the output of `predict_step` for these samples; writes a part once `PART_BYTES` are reached."""
        kept = plain(output)
        self.batches.append((list(samples), kept))
        self.held += sum(int(leaf.nbytes) if isinstance(leaf, Tensor) else 64 for leaf in leaves(kept))
        if self.held >= PART_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes the outputs added since the last part."""
        if self.batches:
            self.folder.mkdir(parents=True, exist_ok=True)
            torch.save(self.batches, self.folder / f"part-{self.rank:05d}-{self.parts:05d}.pt")
        self.batches, self.held, self.parts = [], 0, self.parts + 1


def plain(output: Any) -> Any:
    """Converts an output to CPU tensors and plain types, which can be loaded without running code.

    Raises:
        RequestError: The output contains an object of another type.
    """
    if isinstance(output, Tensor):
        return (
            output.detach().cpu().clone()
            if output.untyped_storage().nbytes() > output.nbytes
            else output.detach().cpu()
        )
    if isinstance(output, np.generic):
        return output.item()
    if isinstance(output, np.ndarray) and output.dtype.kind in "biuf":
        return torch.from_numpy(output.copy())
    if isinstance(output, np.ndarray):
        return plain(output.tolist())
    if type(output) in PLAIN:
        return output
    if isinstance(output, Mapping):
        return {key if type(key) in PLAIN else str(key): plain(value) for key, value in output.items()}
    if isinstance(output, tuple) and hasattr(output, "_asdict"):
        return plain(output._asdict())
    if isinstance(output, list | tuple):
        return (
            type(output)([plain(value) for value in output])
            if type(output) in (list, tuple)
            else list(map(plain, output))
        )
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return {field.name: plain(getattr(output, field.name)) for field in dataclasses.fields(output)}
    raise RequestError(
        "to write what predict_step returns",
        f"it returned a {type(output).__module__}.{type(output).__qualname__}, which only code can read back",
        "a predict_step that returns tensors, numbers, texts, and lists, tuples and dicts of them",
    )


def leaves(value: Any) -> Iterator[Any]:
    """Yields the tensors and plain values of a nested structure."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        yield value
        return
    for part in value:
        yield from leaves(part)


def merge(folder: Path, file: Path) -> int:
    """Merges all parts of a data loader into one file.

    The file has the structure that `predict_step` returns, with one row for each sample of the data set. A row is an
    entry along the first dimension of a tensor, or an entry of a list. If the rows of a tensor differ in shape or dtype
    between batches, the result is a list of tensors.

    Returns:
        The number of samples.

    Raises:
        RequestError: An output does not have one row for each sample.
    """
    parts = sorted(folder.glob("part-*.pt"))
    order, outputs = [], []
    for part in parts:
        for samples, output in torch.load(part, mmap=True, weights_only=True):
            order.append(np.array(samples, dtype=np.int64))
            outputs.append(output)
    numbers = np.concatenate(order) if order else np.zeros(0, np.int64)
    rows = np.empty(len(numbers), np.int64)  # the row of each sample in the result
    rows[np.argsort(numbers, kind="stable")] = np.arange(len(numbers))
    ends = np.cumsum([len(samples) for samples in order])
    places = [torch.from_numpy(rows[end - len(samples) : end]) for samples, end in zip(order, ends, strict=True)]
    merged = _Merge(folder, len(numbers), places).of(outputs, "the output") if outputs else None
    with replacing(file) as beside, synced(beside) as opened:
        torch.save(merged, opened)
    _write_table(merged, np.sort(numbers), file.with_suffix(".csv"))
    for part in [*parts, *folder.glob("*.rows")]:
        part.unlink()
    return len(numbers)


class _Merge:
    """Merges the outputs of all batches.

    Args:
        folder: Folder for the files that back memory-mapped tensors.
        count: Number of samples.
        places: For each batch, the rows of its samples in the result.
    """

    def __init__(self, folder: Path, count: int, places: Sequence[Tensor]) -> None:
        self.folder, self.count, self.places = folder, count, places
        self.files = 0

    def of(self, outputs: Sequence[Any], what: str) -> Any:
        """Merges one value of every batch; `what` names the value in error messages."""
        first = outputs[0]
        sizes = [len(place) for place in self.places]
        if all(
            isinstance(output, Tensor) and output.ndim and len(output) == size
            for output, size in zip(outputs, sizes, strict=True)
        ):
            return self._tensors(outputs)
        if all(output is None for output in outputs):
            return None
        if all(isinstance(output, dict) and output.keys() == first.keys() for output in outputs):
            return {key: self.of([output[key] for output in outputs], f"{what}[{key!r}]") for key in first}
        same = all(type(output) is type(first) in (list, tuple) and len(output) == len(first) for output in outputs)
        if same and (type(first) is tuple or self._holds_batches(outputs, sizes)):
            parts = [self.of([output[i] for output in outputs], f"{what}[{i}]") for i in range(len(first))]
            return type(first)(parts)
        if all(
            isinstance(output, list | tuple) and len(output) == size
            for output, size in zip(outputs, sizes, strict=True)
        ):
            return self._rows(outputs)
        raise RequestError(
            "predictions in the order of the samples",
            f"{what} of predict_step has no row for each sample: {_described(first)} for {sizes[0]} samples",
            "a predict_step that returns tensors, or lists, with one row for each sample of the batch",
        )

    def _holds_batches(self, outputs: Sequence[Any], sizes: Sequence[int]) -> bool:
        """Returns whether all entries of the lists are tensors with one row for each sample of the batch."""
        return all(
            isinstance(value, Tensor) and value.ndim and len(value) == size
            for output, size in zip(outputs, sizes, strict=True)
            for value in output
        )

    def _tensors(self, outputs: Sequence[Tensor]) -> Any:
        if len({(output.shape[1:], output.dtype) for output in outputs}) > 1:
            return self._rows([list(output) for output in outputs])
        result = self._empty((self.count, *outputs[0].shape[1:]), outputs[0].dtype)
        for place, output in zip(self.places, outputs, strict=True):
            result[place] = output
        return result

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns an uninitialized tensor, memory-mapped from a file if it is large."""
        size = math.prod(shape)
        if size * dtype.itemsize < PART_BYTES:
            return torch.empty(shape, dtype=dtype)
        self.files += 1
        return torch.from_file(str(self.folder / f"{self.files}.rows"), shared=True, size=size, dtype=dtype).view(shape)

    def _rows(self, outputs: Sequence[Sequence[Any]]) -> list[Any]:
        rows: list[Any] = [None] * self.count
        for place, output in zip(self.places, outputs, strict=True):
            for row, value in zip(place.tolist(), output, strict=True):
                rows[row] = value.clone() if isinstance(value, Tensor) else value
        return rows


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, list | tuple | dict) else "")


def _write_table(merged: Any, samples: Any, file: Path) -> None:
    """Writes a CSV file if the predictions are numbers and texts in at most `MOST_COLUMNS` columns."""
    columns = _columns(merged, "")
    if not columns or len(columns) > MOST_COLUMNS or any(len(values) != len(samples) for values in columns.values()):
        file.unlink(missing_ok=True)  # from an earlier prediction
        return
    with replacing(file) as beside, beside.open("w", newline="") as opened:
        table = csv.writer(opened)
        table.writerow(["sample", *columns])
        for begin in range(0, len(samples), 4096):
            parts = [values[begin : begin + 4096] for values in columns.values()]
            lists = [part.tolist() if isinstance(part, Tensor) else part for part in parts]
            table.writerows(zip(samples[begin : begin + 4096].tolist(), *lists, strict=True))


def _columns(merged: Any, name: str) -> dict[str, Any] | None:
    """Returns column name -> one value for each sample; None if the predictions do not form a table."""
    if isinstance(merged, Tensor) and not merged.is_complex() and merged.ndim <= 2:
        if merged.ndim == 1:
            return {name or "prediction": merged}
        return {f"{name or 'prediction'}.{i}": merged[:, i] for i in range(merged.shape[1])[: MOST_COLUMNS + 1]}
    if isinstance(merged, dict | tuple) or (isinstance(merged, list) and any(isinstance(x, Tensor) for x in merged)):
        items = merged.items() if isinstance(merged, dict) else enumerate(merged)
        parts = [_columns(value, f"{name}.{key}" if name else str(key)) for key, value in items if value is not None]
        if any(part is None for part in parts):
            return None
        return {key: values for part in parts for key, values in (part or {}).items()}
    if isinstance(merged, list) and all(type(value) in PLAIN for value in merged):
        return {name or "prediction": merged}
    return None
