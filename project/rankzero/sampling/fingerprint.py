"""Fingerprints that distinguish data sets without reading a sample."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

PROBES = 64
"""Number of rows of a tensor, or elements of a list, that enter a digest."""

_DEPTH = 4


def fingerprint(dataset: Any, count: int) -> dict[str, str]:
    """Describes the tensors, arrays and containers among a data set's attributes, from evenly spaced elements.

    No sample is read, because a read may be expensive, and the data set may count its reads. Attributes that are single
    numbers or texts are ignored: they may be a time, a process id or a folder that changes with every job. Paths in
    containers count by file name, without their folders.

    Args:
        dataset: The data set.
        count: Number of its samples.

    Returns:
        Attribute name -> readable description with a digest.
    """
    entries = {"samples": f"{count:,}"}
    _describe(dataset, "", entries, _DEPTH)
    return entries


def changes(previous: Mapping[str, str], current: Mapping[str, str]) -> list[str]:
    """Returns the differences between two fingerprints, one line each."""
    missing = "not there"
    names = [*previous, *(name for name in current if name not in previous)]
    return [
        f"{name}: was {previous.get(name, missing)}, is {current.get(name, missing)}"
        for name in names
        if previous.get(name) != current.get(name)
    ]


def _describe(dataset: Any, prefix: str, entries: dict[str, str], depth: int) -> None:
    entries[f"{prefix}class"] = type(dataset).__qualname__
    for name, value in sorted(getattr(dataset, "__dict__", {}).items()):
        parts = value if isinstance(value, list | tuple) else [value]
        if depth and parts and all(isinstance(part, Dataset) for part in parts):
            for index, part in enumerate(parts):
                _describe(part, f"{prefix}{name}{f'[{index}]' if len(parts) > 1 else ''}.", entries, depth - 1)
        elif isinstance(value, Tensor | np.ndarray):
            entries[prefix + name] = f"{_type_and_shape(value)}, {_digest(value)}"
        elif isinstance(value, list | tuple | dict | set | frozenset) and value:
            entries[prefix + name] = f"{type(value).__name__} of {len(value):,}, {_digest(value)}"


def _type_and_shape(value: Any) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


def _digest(value: Any) -> str:
    return hashlib.sha256(_content(value, _DEPTH)).hexdigest()[:12]


def _content(value: Any, depth: int) -> bytes:
    """Returns bytes to hash; they differ for two values that differ in an examined element."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.device.type == "meta":
            return _type_and_shape(value).encode()
        rows = value.detach()[_probe_indices(len(value))] if value.ndim else value.detach()
        return (
            _type_and_shape(value).encode()
            + rows.reshape(-1)[: 2**20].cpu().contiguous().view(torch.uint8).numpy().tobytes()
        )
    if isinstance(value, np.ndarray):
        probed_rows = value[_probe_indices(len(value))] if value.ndim else value
        return _type_and_shape(value).encode() + (
            b"" if probed_rows.dtype.hasobject else probed_rows.reshape(-1)[: 2**20].tobytes()
        )
    if isinstance(value, str | PurePath):
        return PurePath(value).name.encode(errors="replace")
    if isinstance(value, bool | int | float | complex | bytes | np.generic) or value is None:
        return repr(value).encode()
    if isinstance(value, set | frozenset):
        return str(len(value)).encode()
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, Sequence) and depth:
        return b"\0".join(_content(value[index], depth - 1) for index in _probe_indices(len(value)))
    return type(value).__qualname__.encode()


def _probe_indices(length: int) -> list[int]:
    """Returns up to `PROBES` evenly spaced indices, including the first and the last."""
    return sorted({index * (length - 1) // (PROBES - 1) for index in range(PROBES)}) if length else []
