"""Everything that a comparison needs of one run. Does not import torch."""

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rankzero.runs.reports.recorded_run import (
    CONFIG_FILE,
    RecordedRun,
    read_run,
    stored_config_text,
    with_live_values,
)
from rankzero.runs.reports.run_status import Status, status_of
from rankzero.runs.stored_config import Config, read_config
from rankzero.runs.tensorboard.curves import Curve, read_curves

STEPS, SAMPLES, EPOCHS, SECONDS = "steps", "samples", "epochs", "seconds"
X_AXES = (STEPS, SAMPLES, EPOCHS, SECONDS)

TAGS = {SAMPLES: "x_axis/samples", EPOCHS: "x_axis/epoch"}
"""Axis -> the curve with its values by step, which Rankzero logs since version 0.2."""


class XAxis:
    """The horizontal axis for the curves of one run.

    Args:
        kind: One of `X_AXES`.
        curves: All curves of the run.
        run: What its files record: the start of each attempt, and the totals of the run.
    """

    def __init__(self, kind: str, curves: Mapping[str, Curve], run: RecordedRun) -> None:
        self.kind = kind
        logged = curves.get(TAGS.get(kind, ""))
        position = logged or _position_by_totals(run.steps, run.samples if kind == SAMPLES else run.epochs)
        # Steps count from zero: before step 0, no sample was used.
        points = zip(position.steps, position.values, strict=True) if position else ()
        self._position = [(-1, 0.0), *(point for point in points if point[0] >= 0)]
        self.is_estimated = kind in TAGS and logged is None
        """Whether the run has not logged what the axis needs, so that only the totals of its summary are known."""
        self._times = sorted(time for curve in curves.values() for time in curve.times) if kind == SECONDS else []
        self._starts = sorted(run.starts) or self._times[:1]

    @property
    def is_known(self) -> bool:
        """Whether the positions are known, possibly only by the totals of the run."""
        return self.kind not in TAGS or len(self._position) > 1

    def values(self, curve: Curve) -> list[float]:
        """Returns the position of each value of a curve; the axis must be known."""
        if self.kind == STEPS:
            return [float(step) for step in curve.steps]
        if self.kind == SECONDS:
            return self._seconds(curve.times)
        steps, values = zip(*self._position, strict=True)
        return interpolated(curve.steps, steps, values)

    def _seconds(self, times: Sequence[float]) -> list[float]:
        """Returns the seconds of training until each time, without the time between attempts."""
        offsets, total = [], 0.0
        for start, following in zip(self._starts, [*self._starts[1:], float("inf")], strict=True):
            offsets.append(total)
            last = bisect.bisect_left(self._times, following) - 1
            total += max(0.0, self._times[last] - start) if last >= 0 else 0.0
        attempts = [max(0, bisect.bisect_right(self._starts, time) - 1) for time in times]
        return [
            offsets[attempt] + max(0.0, time - self._starts[attempt])
            for attempt, time in zip(attempts, times, strict=True)
        ]


def _position_by_totals(steps: int | None, total: int | None) -> Curve | None:
    """Returns the position at the last step, for a run whose position grows equally in each step; None if unknown."""
    return Curve([steps - 1], [0.0], [float(total)]) if steps and total else None


def interpolated(steps: Sequence[int], known_steps: Sequence[int], known_values: Sequence[float]) -> list[float]:
    """Returns values at steps, on lines between the known values; the last line continues after the last one.

    Args:
        steps: Steps to return values for.
        known_steps: At least two steps, increasing.
        known_values: The values at these steps.
    """
    found = []
    for step in steps:
        right = min(max(bisect.bisect_left(known_steps, step), 1), len(known_steps) - 1)
        left = right - 1
        slope = (known_values[right] - known_values[left]) / (known_steps[right] - known_steps[left])
        found.append(known_values[left] + slope * (step - known_steps[left]))
    return found


@dataclass(frozen=True)
class ComparedRun:
    """One of the runs that are compared.

    Args:
        label: Its name, or its path if another run has the same name.
        run: What its files record.
        status: Its status.
        config: Configuration of its newest attempt; {} if it cannot be read.
        curves: Its curves, by tag.
    """

    label: str
    run: RecordedRun
    status: Status
    config: Config
    curves: Mapping[str, Curve]

    @property
    def notes(self) -> Iterator[str]:
        """Notes on the run for the user, in addition to the tables."""
        if self.status.note:
            yield f"{self.label}: {self.status.note}"
        if not self.config:
            yield f"{self.label}: {CONFIG_FILE} is missing or damaged, so its settings are not known"
        if not self.curves:
            yield f"{self.label}: there are no curves in {self.run.path / 'tensorboard'}"


def read_compared_runs(paths: Sequence[Path]) -> list[ComparedRun]:
    """Reads runs; values that an unfinished run has logged take the place of those in its summary."""
    compared = [_read(path) for path in paths]
    labels = [entry.label for entry in compared]
    return [replace(entry, label=str(entry.run.path)) if labels.count(entry.label) > 1 else entry for entry in compared]


def _read(path: Path) -> ComparedRun:
    run = read_run(path)
    config = read_config(stored_config_text(path))
    try:
        curves = read_curves(path / "tensorboard")
    except OSError:
        curves = {}
    return ComparedRun(run.name, with_live_values(run), status_of(run), config, curves)
