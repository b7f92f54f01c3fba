"""Reads the curves of a run from its TensorBoard files. Imports neither torch, Lightning nor TensorFlow."""

import bisect
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rankzero.runs.tensorboard.records import CHECKSUM_BYTES, HEADER_BYTES, record_length


@dataclass
class Curve:
    """The values of one tag, with strictly increasing steps.

    Attributes:
        steps: Step of each value.
        times: Time at which each value was logged, in seconds since 1970.
        values: The values, which may be NaN or infinite.
    """

    steps: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def _append(self, step: int, seconds: float, value: float) -> None:
        self.steps.append(step)
        self.times.append(seconds)
        self.values.append(value)

    def _sort(self) -> None:
        """Sorts the points by step; of several points with the same step, the one logged last remains."""
        newest = {step: index for index, step in enumerate(self.steps)}
        if len(newest) == len(self.steps) and self.steps == sorted(self.steps):
            return
        self._keep([newest[step] for step in sorted(newest)])

    def _hide_from(self, step: int) -> None:
        """Removes all points with this step or a later one."""
        self._keep([index for index, own in enumerate(self.steps) if own < step])

    def _keep(self, indices: list[int]) -> None:
        self.steps = [self.steps[index] for index in indices]
        self.times = [self.times[index] for index in indices]
        self.values = [self.values[index] for index in indices]

    def at(self, step: int) -> float:
        """Returns the newest value that was logged at this step or earlier; NaN if there is none."""
        index = bisect.bisect_right(self.steps, step)
        return self.values[index - 1] if index else math.nan


def read_curves(folder: Path) -> dict[str, Curve]:
    """Returns the curves of all event files in a folder, by tag; {} if the folder is missing.

    An attempt that resumes a run begins its file with the step from which it hides values of earlier files. TensorBoard
    hides the same values. A file is read up to its first incomplete or damaged record, as after a crash.

    Args:
        folder: Folder of the event files; its subfolders are not read.
    """
    curves: dict[str, Curve] = {}
    files = [path for path in folder.glob("*tfevents*") if path.is_file() and not path.name.endswith(".profile-empty")]
    for path in sorted(files, key=lambda path: (_creation_time(path), path.name)):
        for event in _events(path):
            if event.session_log.status == event.session_log.START:
                for curve in curves.values():
                    curve._hide_from(event.step)
            for value in event.summary.value:
                number = _number(value)
                if number is not None:
                    if (known := curves.get(value.tag)) is None:
                        known = curves[value.tag] = Curve()
                    known._append(event.step, event.wall_time, number)
    for curve in curves.values():
        curve._sort()
    return {tag: curve for tag, curve in sorted(curves.items()) if curve.steps}


def _creation_time(path: Path) -> float:
    """Returns the time of a file's first event; the time in its name has no fractions of a second."""
    event = next(_events(path), None)
    return event.wall_time if event else math.inf


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
                yield Event.FromString(file.read(length))
                file.seek(CHECKSUM_BYTES, os.SEEK_CUR)
    except (OSError, DecodeError):
        return


def _number(value: Any) -> float | None:
    """Returns the number in an entry of an event, or None for an image, a text and the like."""
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return float(value.simple_value)
    if kind == "tensor" and value.metadata.plugin_data.plugin_name == "scalars":
        from tensorboard.util.tensor_util import make_ndarray

        return float(make_ndarray(value.tensor).item())
    return None
