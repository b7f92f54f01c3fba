"""Reads the curves of a run from its TensorBoard files. Imports neither torch, Lightning nor TensorFlow."""

import math
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rankzero.runs.tensorboard.records import CHECKSUM_BYTES, HEADER_BYTES, is_intact, record_length


@dataclass
class Curve:
    """The values of one tag, with strictly increasing steps. A long curve is downsampled, see `CurveBuilder`.

    Attributes:
        steps: Step of each point.
        times: Time at which each point was logged, in seconds since 1970.
        values: The values, which may be NaN or infinite.
        low: Lowest finite value that was logged, also if it is not among the points; NaN without one.
        high: Highest finite value that was logged; NaN without one.
        not_finite: Number of logged values that are NaN or infinite.
        count: Number of logged values.
    """

    steps: Sequence[int] = field(default_factory=list)
    times: Sequence[float] = field(default_factory=list)
    values: Sequence[float] = field(default_factory=list)
    low: float = math.nan
    high: float = math.nan
    not_finite: int = 0
    count: int = 0

    def __post_init__(self) -> None:
        if not self.count:
            finite = [value for value in self.values if math.isfinite(value)]
            self.low, self.high = min(finite, default=math.nan), max(finite, default=math.nan)
            self.count = len(self.values)
            self.not_finite = self.count - len(finite)

    @property
    def is_downsampled(self) -> bool:
        """Whether some logged values are not among the points."""
        return self.count > len(self.values)


class _File(NamedTuple):
    """An event file.

    Args:
        path: Its path.
        created: Time of its first event; the time in its name has no fractions of a second.
        hides_from: Step from which values of earlier files are hidden; infinite if none are.
    """

    path: Path
    created: float
    hides_from: float


def read_curves(folder: Path) -> dict[str, Curve]:
    """Returns the curves of all event files in a folder, by tag; {} if the folder is missing.

    An attempt that resumes a run begins its file with the step from which it hides values of earlier files. TensorBoard
    hides the same values. A file is read up to its first incomplete or damaged record, as after a crash. Long curves
    are downsampled, so that memory does not grow with the length of the run.
    """
    paths = [path for path in folder.glob("*tfevents*") if path.is_file() and not path.name.endswith(".profile-empty")]
    if not paths:
        return {}
    from rankzero.runs.tensorboard.curve_builder import CurveBuilder  # imports NumPy, in a tenth of a second

    files = sorted(map(_begin, paths), key=lambda file: (file.created, file.path.name))
    builders: defaultdict[str, CurveBuilder] = defaultdict(CurveBuilder)
    for number, file in enumerate(files):
        end = min((later.hides_from for later in files[number + 1 :]), default=math.inf)
        for tag, step, seconds, value in _values(file.path):
            if step < end:
                builders[tag].add(step, seconds, value)
        for builder in builders.values():
            builder.end_file()
    return {tag: builder.build() for tag, builder in sorted(builders.items())}


def _begin(path: Path) -> _File:
    """Reads the beginning of a file, up to its first value."""
    created = hides_from = math.inf
    for event in _events(path):
        created = event.wall_time if created == math.inf else created
        if event.session_log.status == event.session_log.START:
            hides_from = min(hides_from, event.step)
        if event.summary.value:
            break
    return _File(path, created, hides_from)


def _values(path: Path) -> Iterator[tuple[str, int, float, float]]:
    """Yields tag, step, time and number of each value in a file."""
    for event in _events(path):
        step, seconds = event.step, event.wall_time
        for value in event.summary.value:
            number = value.simple_value or _number(value)  # `WhichOneof` takes longer than all other calls
            if number is not None:
                yield value.tag, step, seconds, number


def _events(path: Path) -> Iterator[Any]:
    """Yields the events of a file."""
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event

    try:
        with path.open("rb") as file:
            remaining = os.fstat(file.fileno()).st_size
            while (length := record_length(file.read(HEADER_BYTES))) is not None:
                remaining -= HEADER_BYTES + length + CHECKSUM_BYTES
                if remaining < 0:
                    return
                data = file.read(length)
                if not is_intact(data, file.read(CHECKSUM_BYTES)):
                    return
                yield Event.FromString(data)
    except (OSError, DecodeError):
        return


def _number(value: Any) -> float | None:
    """Returns the number in an entry of an event, or None for an image, a text and the like."""
    return float(value.simple_value) if value.WhichOneof("value") == "simple_value" else None
