"""Reads the newest values of a run from the end of its TensorBoard files. Imports neither torch nor Lightning."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rankzero.runs.tensorboard.records import CHECKSUM_BYTES, HEADER_BYTES, record_length

TAIL_BYTES = (1 << 16, 1 << 18, 1 << 20, 1 << 24)
"""Bytes at the end of a file that are read, the more the more of them are images. The first hold about 600 values."""

LARGE_RECORD_BYTES = 1 << 19
"""Size from which a record is skipped: it contains an image, or more than 5,000 values."""

_LEADING_ZEROS = bytes(5)
"""The upper bytes of a record's size, which is a 64-bit little-endian number below 2^24."""


class Value(NamedTuple):
    """A logged value."""

    step: int
    number: float


def newest_values(folder: Path) -> dict[str, Value]:
    """Returns the value that was logged last for each tag of the newest file with values; {} without values."""
    try:
        files = [(path.stat().st_mtime_ns, path) for path in folder.glob("*tfevents*") if path.is_file()]
        for _, path in sorted(files, reverse=True):
            if values := _values_at_end(path):
                return values
    except OSError:
        pass
    return {}


def _values_at_end(path: Path) -> dict[str, Value]:
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event

    values: dict[str, Value] = {}
    with path.open("rb") as file:
        size = file.seek(0, 2)
        for tail in TAIL_BYTES:
            file.seek(max(0, size - tail))
            records = [record for record in _records(file.read()) if len(record) < LARGE_RECORD_BYTES]
            if sum(map(len, records)) >= TAIL_BYTES[0] // 2:
                break
    for record in records:
        try:
            event = Event.FromString(record)
        except DecodeError:
            break
        for value in event.summary.value:
            if value.WhichOneof("value") == "simple_value":
                values[str(value.tag)] = Value(int(event.step), float(value.simple_value))
    return values


def _records(data: bytes) -> Iterator[bytes]:
    """Yields the complete records in the end of a file."""
    position = _first_record(data)
    while position is not None and (length := _length_at(data, position)) is not None:
        begin = position + HEADER_BYTES
        if begin + length > len(data):
            return
        yield data[begin : begin + length]
        position = begin + length + CHECKSUM_BYTES


def _first_record(data: bytes) -> int | None:
    """Returns the position of the first record in the end of a file; None without one."""
    zeros = data.find(_LEADING_ZEROS)
    while zeros >= 0:
        if zeros >= 3 and _length_at(data, zeros - 3) is not None:
            return zeros - 3
        zeros = data.find(_LEADING_ZEROS, zeros + 1)
    return None


def _length_at(data: bytes, position: int) -> int | None:
    return record_length(data[position : position + HEADER_BYTES])
