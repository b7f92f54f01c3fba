"""Fingerprints that distinguish data sets without reading a sample."""

import hashlib
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import PurePath
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from rankzero.distributed.monitoring.hangs import differences
from rankzero.messages import RequestError

PROBES = 64
"""Number of rows of a tensor, or elements of a list, that enter a digest."""

_DEPTH = 4


def fingerprint(dataset: Any, count: int) -> dict[str, str]:
    """Returns the names of a data set's attributes -> readable descriptions, with digests of evenly spaced elements.

    These attributes are tensors, arrays and containers. Single numbers and texts are ignored: they may be a time, a
    process id or a folder that changes with every job. Paths in containers count by file name, without their folders.
    No sample is read, because a read may be expensive, and the data set may count its reads.
    """
    entries = {"samples": f"{count:,}"}
    _describe(dataset, "", entries, _DEPTH)
    return entries


def changes(previous: Mapping[str, str], current: Mapping[str, str]) -> list[str]:
    """Returns the differences between two fingerprints, one line each."""
    missing = "not there"
    pairs = {name: (previous.get(name, missing), current.get(name, missing)) for name in {**previous, **current}}
    return [f"{name}: was {before}, is {now}" for name, (before, now) in pairs.items() if before != now]


def differing(
    parts: Sequence[Mapping[str, str]], hosts: Sequence[str], missing: str = "none", ignores_missing: bool = False
) -> dict[str, list[str]]:
    """Returns which properties differ between ranks: name -> description of who has which value.

    A rank that does not have a name counts as having the value `missing`, or as no difference with `ignores_missing`.
    """
    names = dict.fromkeys(name for values in parts for name in values)
    compared = [name for name in names if not ignores_missing or all(name in values for values in parts)]
    found = {name: differences([values.get(name, missing) for values in parts], hosts) for name in compared}
    return {name: texts for name, texts in found.items() if texts}


def differences_between_ranks(fingerprints: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> list[str]:
    """Returns the differences between the fingerprints of all ranks, one line each."""
    return [f"{name}: {'; '.join(texts)}" for name, texts in differing(fingerprints, hosts, "missing").items()]


def check_same_data(
    dataset: Any, properties: Mapping[str, str], accepts: bool, gather: Callable[[Any], list[Any]]
) -> None:
    """Raises a RequestError if the ranks have different loaders, or loaders with different data. All ranks must call.

    The ranks compare the content of each data set once: after its first use, it may hold other samples on each rank, in
    a cache. With `accepts`, or without a data set, they compare only the properties, which they always compare.
    """
    entries = dict(properties)
    if dataset is not None and not accepts:
        _describe(dataset, "", entries, _DEPTH, omits_compared=True)
    if len(set(gather(hashlib.sha256(repr(entries).encode()).hexdigest()))) == 1:
        return
    ranks = gather([socket.gethostname(), entries])
    lines = differences_between_ranks([rank[1] for rank in ranks], [rank[0] for rank in ranks])
    content_only = lines[0].partition(":")[0] not in properties
    found = "the data differs between ranks, so that some samples would be repeated and others never used"
    others = [f"and {len(lines) - 4} further differences"] if len(lines) > 4 else []
    instead = "the same loaders and data on all ranks: the same files, in sorted order, and a seed for data that is "
    instead += "generated or split at random; Rankzero divides the samples among the ranks"
    instead += "\nor --accept_changed data, if the difference does not matter" * content_only
    asked = f"{ranks[0][1]['loader']} on {len(ranks)} ranks"
    raise RequestError(asked, "\n".join([found, *lines[:4], *others]), instead)


_compared: "WeakValueDictionary[int, Any]" = WeakValueDictionary()
"""The data sets whose content all ranks have compared, by id."""


def _describe(dataset: Any, prefix: str, entries: dict[str, str], depth: int, omits_compared: bool = False) -> None:
    entries[f"{prefix}class"] = type(dataset).__qualname__
    if omits_compared:
        if id(dataset) in _compared:
            return
        with suppress(TypeError):  # a list, for example, cannot be referenced weakly
            _compared[id(dataset)] = dataset
    attributes = {"content": dataset} if isinstance(dataset, list | tuple | dict) else getattr(dataset, "__dict__", {})
    for name, value in sorted(attributes.items()):
        parts = value if isinstance(value, list | tuple) else [value]
        if depth and parts and all(isinstance(part, Dataset) for part in parts):
            for index, part in enumerate(parts):
                part_prefix = f"{prefix}{name}{f'[{index}]' if len(parts) > 1 else ''}."
                _describe(part, part_prefix, entries, depth - 1, omits_compared)
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
        elements = rows.reshape(-1)[: 2**20].cpu().contiguous().view(torch.uint8).numpy()
        return _type_and_shape(value).encode() + elements.tobytes()
    if isinstance(value, np.ndarray):
        probed_rows = value[_probe_indices(len(value))] if value.ndim else value
        content = b"" if probed_rows.dtype.hasobject else probed_rows.reshape(-1)[: 2**20].tobytes()
        return _type_and_shape(value).encode() + content
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
