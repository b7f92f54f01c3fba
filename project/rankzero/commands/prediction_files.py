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

from rankzero.checkpoints.atomic_files import replacing, synced
from rankzero.messages import RequestError

PART_BYTES = 64 * 2**20
"""Bytes of outputs after which a rank writes a part, and size from which a merged tensor is memory-mapped."""

MAX_COLUMNS = 64
"""Maximum number of columns of the CSV table; wider predictions get no table."""

PLAIN_TYPES = (str, int, float, bool, type(None))


class PartWriter:
    """Writes the outputs of one rank for one data loader to part files."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.batches: list[tuple[list[int], Any]] = []
        self.buffered_bytes = self.part_count = 0

    def add(self, samples: Sequence[int], output: Any) -> None:
        """Adds the output of `predict_step` for these samples; writes a part once `PART_BYTES` are reached."""
        converted = as_plain(output)
        self.batches.append((list(samples), converted))
        self.buffered_bytes += sum(int(leaf.nbytes) if isinstance(leaf, Tensor) else 64 for leaf in leaves(converted))
        if self.buffered_bytes >= PART_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes the outputs added since the last part."""
        if self.batches:
            self.folder.mkdir(parents=True, exist_ok=True)
            torch.save(self.batches, self.folder / f"part-{self.rank:05d}-{self.part_count:05d}.pt")
        self.batches, self.buffered_bytes, self.part_count = [], 0, self.part_count + 1


def as_plain(output: Any) -> Any:
    """Converts an output to CPU tensors and plain types, which can be loaded without running code.

    Raises:
        RequestError: The output contains an object of another type.
    """
    if isinstance(output, Tensor):
        plain = output.detach().cpu()
        return plain.clone() if output.untyped_storage().nbytes() > output.nbytes else plain
    if isinstance(output, np.generic):
        return output.item()
    if isinstance(output, np.ndarray):
        return torch.from_numpy(output.copy()) if output.dtype.kind in "biuf" else as_plain(output.tolist())
    if type(output) in PLAIN_TYPES:
        return output
    if isinstance(output, Mapping):
        return {key if type(key) in PLAIN_TYPES else str(key): as_plain(value) for key, value in output.items()}
    if isinstance(output, tuple) and hasattr(output, "_asdict"):
        return as_plain(output._asdict())
    if isinstance(output, list | tuple):
        values = list(map(as_plain, output))
        return tuple(values) if type(output) is tuple else values
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return {field.name: as_plain(getattr(output, field.name)) for field in dataclasses.fields(output)}
    raise RequestError(
        "to write the results of predict_step",
        f"it returned a {type(output).__module__}.{type(output).__qualname__}, which runs code when it is loaded",
        "a predict_step that returns tensors, numbers, strings, or lists, tuples and dicts of these",
    )


def leaves(value: Any) -> Iterator[Any]:
    """Yields the tensors and plain values of a nested structure."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        yield value
        return
    for item in value:
        yield from leaves(item)


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
    batch_indices, outputs = [], []
    for part in parts:
        for samples, output in torch.load(part, mmap=True, weights_only=True):
            batch_indices.append(np.array(samples, dtype=np.int64))
            outputs.append(output)
    indices = np.concatenate(batch_indices) if batch_indices else np.zeros(0, np.int64)
    rows = np.empty(len(indices), np.int64)  # the row of each sample in the result
    rows[np.argsort(indices, kind="stable")] = np.arange(len(indices))
    ends = np.cumsum([len(samples) for samples in batch_indices])
    batch_rows = [torch.from_numpy(part) for part in np.split(rows, ends[:-1])]
    merged = _Merger(folder, len(indices), batch_rows).merge(outputs, "the output") if outputs else None
    with replacing(file) as temporary, synced(temporary) as stream:
        torch.save(merged, stream)
    _write_table(merged, np.sort(indices), file.with_suffix(".csv"))
    for part in [*parts, *folder.glob("*.rows")]:
        part.unlink()
    return len(indices)


class _Merger:
    """Merges the outputs of all batches.

    Args:
        folder: Folder for the files that back memory-mapped tensors.
        count: Number of samples.
        batch_rows: For each batch, the rows of its samples in the result.
    """

    def __init__(self, folder: Path, count: int, batch_rows: Sequence[Tensor]) -> None:
        self.folder, self.count, self.batch_rows = folder, count, batch_rows
        self.files = 0

    def merge(self, outputs: Sequence[Any], name: str) -> Any:
        """Merges one value of every batch; `name` is its name in error messages."""
        first = outputs[0]
        pairs = [(output, len(rows)) for output, rows in zip(outputs, self.batch_rows, strict=True)]
        if all(_is_batch(output, size) for output, size in pairs):
            return self._tensors(outputs)
        if all(output is None for output in outputs):
            return None
        if all(isinstance(output, dict) and output.keys() == first.keys() for output in outputs):
            return {key: self.merge([output[key] for output in outputs], f"{name}[{key!r}]") for key in first}
        same = all(type(output) is type(first) in (list, tuple) and len(output) == len(first) for output in outputs)
        if same and (type(first) is tuple or all(_is_batch(value, size) for output, size in pairs for value in output)):
            parts = [self.merge([output[i] for output in outputs], f"{name}[{i}]") for i in range(len(first))]
            return type(first)(parts)
        if all(isinstance(output, list | tuple) and len(output) == size for output, size in pairs):
            return self._rows(outputs)
        raise RequestError(
            "predictions in the order of the samples",
            f"{name} of predict_step does not have one row per sample: {_description(first)} for {pairs[0][1]} samples",
            "a predict_step that returns tensors or lists with one row per sample of the batch",
        )

    def _tensors(self, outputs: Sequence[Tensor]) -> Any:
        if len({(output.shape[1:], output.dtype) for output in outputs}) > 1:
            return self._rows([list(output) for output in outputs])
        result = self._empty((self.count, *outputs[0].shape[1:]), outputs[0].dtype)
        for rows, output in zip(self.batch_rows, outputs, strict=True):
            result[rows] = output
        return result

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns an uninitialized tensor, memory-mapped from a file if it is large."""
        size = math.prod(shape)
        if size * dtype.itemsize < PART_BYTES:
            return torch.empty(shape, dtype=dtype)
        self.files += 1
        return torch.from_file(str(self.folder / f"{self.files}.rows"), shared=True, size=size, dtype=dtype).view(shape)

    def _rows(self, outputs: Sequence[Sequence[Any]]) -> list[Any]:
        merged: list[Any] = [None] * self.count
        for rows, output in zip(self.batch_rows, outputs, strict=True):
            for row, value in zip(rows.tolist(), output, strict=True):
                merged[row] = value.clone() if isinstance(value, Tensor) else value
        return merged


def _is_batch(value: Any, size: int) -> bool:
    """Returns whether a value is a tensor with one row for each sample of the batch."""
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == size


def _description(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, list | tuple | dict) else "")


def _write_table(merged: Any, samples: Any, file: Path) -> None:
    """Writes a CSV file if the predictions are numbers and texts in at most `MAX_COLUMNS` columns."""
    columns = _columns(merged, "")
    if not columns or len(columns) > MAX_COLUMNS or any(len(values) != len(samples) for values in columns.values()):
        file.unlink(missing_ok=True)  # from an earlier prediction
        return
    with replacing(file) as temporary, temporary.open("w", newline="") as stream:
        table = csv.writer(stream)
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
        return {f"{name or 'prediction'}.{i}": merged[:, i] for i in range(merged.shape[1])[: MAX_COLUMNS + 1]}
    if isinstance(merged, dict | tuple) or (isinstance(merged, list) and any(isinstance(x, Tensor) for x in merged)):
        items = merged.items() if isinstance(merged, dict) else enumerate(merged)
        nested = [_columns(value, f"{name}.{key}" if name else str(key)) for key, value in items if value is not None]
        if any(columns is None for columns in nested):
            return None
        return {key: values for columns in nested for key, values in (columns or {}).items()}
    if isinstance(merged, list) and all(type(value) in PLAIN_TYPES for value in merged):
        return {name or "prediction": merged}
    return None
