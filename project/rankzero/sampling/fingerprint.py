"""What tells one data set from another, without reading a sample."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

PROBES = 64
"""Rows of a tensor, or elements of a list, that are looked at."""

_DEPTH = 4


def fingerprint(dataset: Any, count: int) -> dict[str, str]:
    """Describes a data set by what it holds: the tensors, arrays and lists that are its attributes, in samples.

    No sample is read, since that may cost much, and may be noted by whoever counts what is read. Numbers and texts
    beside the data are left out: they may be a time, a process, or a folder that each job has anew. So are the folders
    of paths, but not their names.

    Args:
        dataset: The data set.
        count: How many samples it has.

    Returns:
        Attribute -> what it holds, for a person to compare.
    """
    found = {"samples": f"{count:,}"}
    _describe(dataset, "", found, _DEPTH)
    return found


def changes(was: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What differs between two fingerprints, a line each."""
    nothing = "not there"
    names = [*was, *(name for name in now if name not in was)]
    return [
        f"{name}: was {was.get(name, nothing)}, is {now.get(name, nothing)}"
        for name in names
        if was.get(name) != now.get(name)
    ]


def _describe(dataset: Any, prefix: str, found: dict[str, str], depth: int) -> None:
    found[f"{prefix}class"] = type(dataset).__qualname__
    for name, value in sorted(getattr(dataset, "__dict__", {}).items()):
        inner = value if isinstance(value, list | tuple) else [value]
        if depth and inner and all(isinstance(part, Dataset) for part in inner):
            for number, part in enumerate(inner):
                _describe(part, f"{prefix}{name}{f'[{number}]' if len(inner) > 1 else ''}.", found, depth - 1)
        elif isinstance(value, Tensor | np.ndarray):
            found[prefix + name] = f"{_form(value)}, {_digest(value)}"
        elif isinstance(value, list | tuple | dict | set | frozenset) and value:
            found[prefix + name] = f"{type(value).__name__} of {len(value):,}, {_digest(value)}"


def _form(value: Any) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


def _digest(value: Any) -> str:
    return hashlib.sha256(_content(value, _DEPTH)).hexdigest()[:12]


def _content(value: Any, depth: int) -> bytes:
    """Bytes that differ where the content differs, but for what is not looked at."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.device.type == "meta":
            return _form(value).encode()
        rows = value.detach()[_probes(len(value))] if value.ndim else value.detach()
        return _form(value).encode() + rows.reshape(-1)[: 2**20].cpu().contiguous().view(torch.uint8).numpy().tobytes()
    if isinstance(value, np.ndarray):
        seen = value[_probes(len(value))] if value.ndim else value
        return _form(value).encode() + (b"" if seen.dtype.hasobject else seen.reshape(-1)[: 2**20].tobytes())
    if isinstance(value, str | PurePath):
        return PurePath(value).name.encode(errors="replace")
    if isinstance(value, bool | int | float | complex | bytes | np.generic) or value is None:
        return repr(value).encode()
    if isinstance(value, set | frozenset):
        return str(len(value)).encode()
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, Sequence) and depth:
        return b"\0".join(_content(value[place], depth - 1) for place in _probes(len(value)))
    return type(value).__qualname__.encode()


def _probes(length: int) -> list[int]:
    """Places that are spread evenly, the first and the last among them."""
    return sorted({place * (length - 1) // (PROBES - 1) for place in range(PROBES)}) if length else []
