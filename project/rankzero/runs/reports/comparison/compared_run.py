"""Everything that a comparison needs of its runs: status, configuration, curves and panels. Does not import torch."""

import bisect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from rankzero.runs.metrics.curves import Curve, read_curves
from rankzero.runs.metrics.metrics_file import METRICS_FILE
from rankzero.runs.reports.recorded_run import (
    CONFIG_FILE,
    RecordedRun,
    Status,
    read_run,
    status_of,
    with_live_values,
)
from rankzero.runs.reports.text import is_measurement, is_training_loss, is_validation, main_metric
from rankzero.runs.stored_config import Config, read_config

STEPS, SAMPLES, EPOCHS, SECONDS = "steps", "samples", "epochs", "seconds"
X_AXES = (STEPS, SAMPLES, EPOCHS, SECONDS)


class TrainingClock:
    """Measures the time of a run without the time between its attempts."""

    def __init__(self, starts: Iterable[float], curves: Mapping[str, Curve]) -> None:
        self._times = sorted(time for curve in curves.values() for time in curve.times)
        self._starts = sorted(starts) or self._times[:1]

    def seconds(self, times: Sequence[float]) -> list[float]:
        """Returns the seconds of training until each time."""
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


@dataclass(frozen=True)
class ComparedRun:
    """One of the runs that are compared."""

    label: str
    run: RecordedRun
    status: Status
    config: Config
    curves: Mapping[str, Curve]

    def positions(self, curve: Curve, kind: str) -> Sequence[float]:
        """Returns the position of each value of a curve on a horizontal axis, one of `X_AXES`."""
        if kind == SECONDS:
            return TrainingClock(self.run.starts, self.curves).seconds(curve.times)
        return {STEPS: curve.steps, SAMPLES: curve.samples, EPOCHS: curve.epochs}[kind]

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
    return ComparedRun(run.name, with_live_values(run), status_of(run), read_config(run.config), read_curves(path))


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
    notes = []
    found = []
    for metric in metrics:
        lines, averaged = [], 1
        for number, entry in enumerate(compared):
            tag = loss_tag(entry.curves) if metric == TRAIN_LOSS else metric
            curve = entry.curves.get(tag or "")
            if not entry.curves:
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
            lines.append(Line(number, means(entry.positions(curve, kind), size), means(curve.values, size)))
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
