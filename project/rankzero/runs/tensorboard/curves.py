"""Reads the curves of a run from its TensorBoard files. Imports neither torch, Lightning nor TensorFlow."""

import math
import os
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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


MAX_POINTS = 1 << 14
"""Number of points above which a curve is downsampled; 25 curves then take 10 MB."""


class CurveBuilder:
    """Collects the points of a curve, in the order in which they were logged.

    Of several points with the same step, the one logged last remains. Whenever there are more than `MAX_POINTS`, only
    the first point of each interval of steps remains, and the length of these intervals doubles until half of the
    points are left. Curves that were logged at the same steps thus keep common steps. The last points of the curve and
    of each file remain as well.
    """

    def __init__(self) -> None:
        self._steps: array[Any] = array("q")
        self._times: array[Any] = array("d")
        self._values: array[Any] = array("d")
        self._ends: list[tuple[int, float, float]] = []
        self._interval = 1
        self._low, self._high, self._not_finite, self._count = math.inf, -math.inf, 0, 0
        self._reduced = 0
        """Number of points at the beginning that are counted already."""

    def add(self, step: int, seconds: float, value: float) -> None:
        """Adds a point that was logged `seconds` after 1970."""
        self._steps.append(step)
        self._times.append(seconds)
        self._values.append(value)
        if len(self._steps) > MAX_POINTS:
            self._reduce(MAX_POINTS // 2)

    def end_file(self) -> None:
        """Keeps the point that was added last."""
        if self._steps:
            self._ends.append((self._steps[-1], self._times[-1], self._values[-1]))

    def build(self) -> Curve:
        """Returns the curve."""
        is_downsampled = self._interval > 1
        self._reduce(MAX_POINTS)
        if not is_downsampled:
            return Curve(self._steps, self._times, self._values)
        for position, numbers in enumerate(self._points):
            numbers[:0] = array(numbers.typecode, [end[position] for end in self._ends])
        self._keep(_newest_by_step(np.array(self._steps)))
        if self._low > self._high:
            self._low = self._high = math.nan
        return Curve(*self._points, self._low, self._high, self._not_finite, self._count)

    @property
    def _points(self) -> tuple["array[Any]", "array[Any]", "array[Any]"]:
        return self._steps, self._times, self._values

    def _reduce(self, limit: int) -> None:
        """Counts the new points, sorts all of them by step, and downsamples them to at most `limit` points."""
        new = np.array(self._values[self._reduced :])
        finite = new[np.isfinite(new)]
        self._count += len(new)
        self._not_finite += len(new) - len(finite)
        self._low = min(self._low, finite.min(initial=math.inf))
        self._high = max(self._high, finite.max(initial=-math.inf))
        steps = np.array(self._steps)
        newest = _newest_by_step(steps)
        kept = newest[_first_of_intervals(steps[newest], self._interval)]
        while len(kept) > limit:
            self._interval *= 2
            kept = newest[_first_of_intervals(steps[newest], self._interval)]
        self._keep(kept)
        self._reduced = len(kept)

    def _keep(self, indices: NDArray[np.int64]) -> None:
        self._steps, self._times, self._values = (
            array(numbers.typecode, np.array(numbers)[indices].tobytes()) for numbers in self._points
        )


def _newest_by_step(steps: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the index of the last point with each step, by step."""
    _, from_end = np.unique(steps[::-1], return_index=True)
    return len(steps) - 1 - from_end


def _first_of_intervals(steps: NDArray[np.int64], interval: int) -> NDArray[np.bool_]:
    """Returns which of increasing steps are the first of an interval, or the last step."""
    kept = np.ones(len(steps), dtype=bool)
    kept[1:] = np.diff(steps // interval) > 0
    kept[-1:] = True
    return kept


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

    Args:
        folder: Folder of the event files; its subfolders are not read.
    """
    paths = [path for path in folder.glob("*tfevents*") if path.is_file() and not path.name.endswith(".profile-empty")]
    if not paths:
        return {}
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
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return float(value.simple_value)
    if kind == "tensor" and value.metadata.plugin_data.plugin_name == "scalars":
        from tensorboard.util.tensor_util import make_ndarray

        with suppress(TypeError, ValueError):  # not a single number: no file of Rankzero has such a scalar
            return float(make_ndarray(value.tensor).item())
    return None
