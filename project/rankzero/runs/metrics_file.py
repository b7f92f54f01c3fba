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

from rankzero.checkpoints.atomic_files import make_folder, replacing, synced

METRICS_FILE = "metrics.jsonl"

TAIL_BYTES = 1 << 18
"""Bytes at the end of a file in which the newest values are looked up; about 300. It grows until it contains a row."""

MAX_COUNT, MAX_SECONDS = 2**53, 1e11
"""Greatest step, number of samples or epochs, and time that a row may state."""

MAX_NUMBER, MIN_NUMBER = 3.4028235e38, 1.1754944e-38
"""Greatest number and smallest normal number of 32 bits; smaller ones are read as 0."""


class Row(NamedTuple):
    """The values that were logged at a step, by tag, and the time in seconds since 1970.

    `step` is the number of optimizer steps before the step, as on TensorBoard's axis. The number of epochs, with a
    fraction, and the number of samples that the run has trained on are None if unknown.
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


def cut_rows(run: Path, step: int, samples: int = -1) -> None:
    """Removes the rows that an attempt logged after the checkpoint from which the run resumes.

    A row of the checkpoint's step is of the next step, or of an evaluation after the last one; the number of samples in
    the checkpoint tells these apart.
    """

    def is_kept(row: Row) -> bool:
        return row.step < step or (row.step == step and row.samples is not None and row.samples <= samples)

    path = run / METRICS_FILE
    if not path.exists():
        return
    with replacing(path) as temporary, synced(temporary) as file, path.open("rb") as earlier:
        file.writelines(line for line in earlier if (row := _row(line)) is not None and is_kept(row))


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
            size, tail = file.seek(0, os.SEEK_END), TAIL_BYTES
            while True:
                file.seek(max(0, size - tail))
                rows = [row for line in file if (row := _row(line)) is not None]
                if rows or tail >= size:
                    return rows
                tail *= 8
    except OSError:
        return []


def _row(line: bytes) -> Row | None:
    """Returns the row in a line; None if the line is incomplete or damaged."""
    try:
        row: dict[str, Any] = json.loads(line)
        values = {tag: _number(number) for tag, number in row["values"].items()}
        step, seconds = int(_checked(row["step"])), _checked(row["seconds"], MAX_SECONDS)
        epoch, samples = (None if row[name] is None else _checked(row[name]) for name in ("epoch", "samples"))
        return Row(step, seconds, values, epoch, None if samples is None else int(samples))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def _checked(number: Any, greatest: float = MAX_COUNT) -> float:
    """Returns a number; raises a ValueError if it is not between 0 and the greatest."""
    if not 0 <= float(number) <= greatest:
        raise ValueError
    return float(number)


def _number(number: Any) -> float:
    """Returns a logged value; NaN for null. Numbers beyond those of 32 bits are infinite or 0."""
    value = math.nan if number is None else float(number)
    if abs(value) > MAX_NUMBER:
        return math.copysign(math.inf, value)
    return 0.0 if abs(value) < MIN_NUMBER else value
