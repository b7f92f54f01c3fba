"""Everything that a comparison needs of its runs: status, configuration, curves and panels. Does not import torch."""

import bisect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from rankzero.runs.metrics.curves import Curve, read_curves
from rankzero.runs.metrics.metrics_file import METRICS_FILE
from rankzero.runs.reports.html.plot import interpolated
from rankzero.runs.reports.recorded_run import (
    CONFIG_FILE,
    RecordedRun,
    read_run,
    stored_config_text,
    with_live_values,
)
from rankzero.runs.reports.run_status import Status, status_of
from rankzero.runs.reports.shown_metrics import is_measurement, is_training_loss, is_validation, main_metric
from rankzero.runs.stored_config import Config, read_config

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
        return [interpolated(self._position, step) for step in curve.steps]

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


@dataclass(frozen=True)
class ComparedRun:
    """One of the runs that are compared."""

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
            yield f"{self.label}: there are no curves in {self.run.path / METRICS_FILE}"


def read_compared_runs(paths: Sequence[Path]) -> list[ComparedRun]:
    """Reads runs; values that an unfinished run has logged take the place of those in its summary."""
    compared = [_read(path) for path in paths]
    labels = [entry.label for entry in compared]
    return [replace(entry, label=str(entry.run.path)) if labels.count(entry.label) > 1 else entry for entry in compared]


def _read(path: Path) -> ComparedRun:
    run = read_run(path)
    config = read_config(stored_config_text(path))
    return ComparedRun(run.name, with_live_values(run), status_of(run), config, read_curves(path))


MAX_PANELS = 6
MAX_POINTS = 400
"""Number of points of a drawn curve; of a longer one, means of equally many values are drawn."""

TRAIN_LOSS = "train loss"
_LOSS_TAGS = ("train/mean_loss", "train/loss")
"""Rankzero logs the loss over all ranks under the second name, and under the first if the model uses the second."""


class Line(NamedTuple):
    """The curve of one run in a panel."""

    number: int
    x: Sequence[float]
    y: Sequence[float]


class Panel(NamedTuple):
    """A panel of the figure."""

    title: str
    lines: Sequence[Line]
    averaged: int = 1


def all_tags(compared: Sequence[ComparedRun]) -> list[str]:
    """Returns the tags of all curves of the runs, in alphabetical order."""
    return sorted({tag for entry in compared for tag in entry.curves})


def chosen_metrics(compared: Sequence[ComparedRun]) -> tuple[list[str], list[str]]:
    """Returns what is drawn without `--metric`, train loss and validation metrics, and the tags without a panel.

    Metrics of many runs come first, then the one that matters most.
    """
    tags = [tag for tag in all_tags(compared) if not is_measurement(tag) and not tag.endswith("_step")]
    count = {tag: sum(tag in entry.curves for entry in compared) for tag in tags}
    has_loss = any(loss_tag(entry.curves) for entry in compared)
    validation = [tag for tag in tags if is_validation(tag)] or ([] if has_loss else tags)
    first = main_metric(validation, next((entry.run.kept_best for entry in compared if entry.run.kept_best), None))
    validation.sort(key=lambda tag: (-count[tag], tag != first, tag))
    metrics = [*([TRAIN_LOSS] if has_loss else []), *validation]
    return metrics[:MAX_PANELS], metrics[MAX_PANELS:]


def loss_tag(curves: Mapping[str, Curve]) -> str | None:
    """Returns the tag of a run's loss on training data; None without one."""
    for tag in _LOSS_TAGS:
        if tag in curves:
            return tag
    candidates = [tag for tag in curves if is_training_loss(tag) and not is_measurement(tag)]
    return min(candidates, key=lambda tag: (not tag.startswith("train"), len(tag), tag), default=None)


def panels(compared: Sequence[ComparedRun], metrics: Sequence[str], kind: str) -> tuple[list[Panel], list[str]]:
    """Returns the panels, and notes about curves that are missing."""
    axes = [XAxis(kind, entry.curves, entry.run) for entry in compared]
    notes = []
    for entry, axis in zip(compared, axes, strict=True):
        if entry.curves and axis.is_estimated:
            reason = f"{entry.label}: it has not logged its {kind} by step"
            estimate = f"{reason}; drawn as if each of its steps had equally many {kind}"
            notes.append(estimate if axis.is_known else f"{reason}, so it is not drawn; --x steps draws it")
    found = []
    for metric in metrics:
        lines, averaged = [], 1
        for number, (entry, axis) in enumerate(zip(compared, axes, strict=True)):
            tag = loss_tag(entry.curves) if metric == TRAIN_LOSS else metric
            curve = entry.curves.get(tag or "")
            if not entry.curves or not axis.is_known:
                continue
            if curve is None:
                notes.append(f"{entry.label}: has no curve of {metric}")
                continue
            if curve.not_finite:
                notes.append(
                    f"{entry.label}: {curve.not_finite:,} of {curve.count:,} values of {metric} are not finite"
                )
            size = -(-len(curve.values) // MAX_POINTS)
            averaged = max(averaged, size)
            lines.append(Line(number, means(axis.values(curve), size), means(curve.values, size)))
        if lines:
            found.append(Panel(metric, lines, averaged))
    return found, notes


def means(values: Sequence[float], size: int) -> list[float]:
    """Returns the means of about `size` successive values each, of the finite ones; NaN if none is finite."""
    averages, count = [], -(-len(values) // size)
    for group in range(count):
        begin, end = group * len(values) // count, (group + 1) * len(values) // count
        finite = [value for value in values[begin:end] if math.isfinite(value)]
        averages.append(math.fsum(finite) / len(finite) if finite else math.nan)
    return averages
