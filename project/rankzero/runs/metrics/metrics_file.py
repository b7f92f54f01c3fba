"""`metrics.jsonl` in the directory of a run: the logged values, one JSON object per line. Does not import torch.

Each object has the keys `step`, `epoch`, `samples`, `seconds` (since 1970) and `values`, a number by tag; null stands
for a value that is NaN or infinite.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rankzero.runs.checkpoints.atomic_files import make_folder, replacing, synced

METRICS_FILE = "metrics.jsonl"

TAIL_BYTES = 1 << 18
"""Bytes at the end of a file in which the newest values are looked up; about 300 rows."""


class Row(NamedTuple):
    """The values that were logged at a step.

    Args:
        step: Number of optimizer steps before the step, as on TensorBoard's axis.
        seconds: Time, in seconds since 1970.
        values: Tag -> number.
        epoch: Number of epochs, with a fraction; None if unknown.
        samples: Number of samples that the run has trained on; None if unknown.
    """

    step: int
    seconds: float
    values: dict[str, float]
    epoch: float | None = None
    samples: int | None = None

    def line(self) -> bytes:
        """Returns the row as a line of the file."""
        values = {tag: number if math.isfinite(number) else None for tag, number in self.values.items()}
        seconds, epoch = round(self.seconds, 3), self.epoch and round(self.epoch, 6)
        row = {"step": self.step, "epoch": epoch, "samples": self.samples, "seconds": seconds, "values": values}
        return json.dumps(row).encode() + b"\n"


def append_rows(run: Path, rows: Iterable[Row], durably: bool) -> None:
    """Appends all rows to the file of a run, or none; with `durably`, they are on the disk afterwards.

    Raises:
        OSError: The rows cannot be written, for example because the disk is full.
    """
    make_folder(run)
    with (run / METRICS_FILE).open("ab", buffering=0) as file:
        size, rest = file.seek(0, os.SEEK_END), memoryview(b"".join(row.line() for row in rows))
        try:
            while rest:
                rest = rest[file.write(rest) :]
            if durably:
                os.fsync(file.fileno())
        except OSError:
            file.truncate(size)
            raise


def cut_rows(run: Path, step: int) -> None:
    """Removes the rows from a step on, which an attempt logged after the checkpoint from which the run resumes."""
    path = run / METRICS_FILE
    if not path.exists():
        return
    with replacing(path) as temporary, synced(temporary) as file, path.open("rb") as earlier:
        file.writelines(line for line in earlier if (row := _row(line)) is not None and row.step < step)


def read_rows(run: Path) -> Iterator[Row]:
    """Yields the rows of a run, without damaged lines; none if the file is missing or cannot be read."""
    try:
        with (run / METRICS_FILE).open("rb") as file:
            yield from filter(None, map(_row, file))
    except OSError:
        return


def newest_rows(run: Path) -> list[Row]:
    """Returns the last rows of a run; none if the file is missing."""
    try:
        with (run / METRICS_FILE).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return [row for line in file if (row := _row(line)) is not None]
    except OSError:
        return []


def _row(line: bytes) -> Row | None:
    """Returns the row in a line; None if the line is incomplete or damaged."""
    try:
        row: dict[str, Any] = json.loads(line)
        values = {tag: math.nan if number is None else float(number) for tag, number in row["values"].items()}
        return Row(int(row["step"]), float(row["seconds"]), values, row["epoch"], row["samples"])
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
