"""Which curves of runs are drawn, and in which panels. Does not import torch."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rankzero.runs.reports.comparison.compared_run import ComparedRun, XAxis
from rankzero.runs.reports.shown_metrics import is_measurement, is_training_loss, is_validation, main_metric
from rankzero.runs.tensorboard.curves import Curve

MAX_PANELS = 6
MAX_POINTS = 400
"""Number of points of a drawn curve; of a longer one, means of equally many values are drawn."""

TRAIN_LOSS = "train loss"
_LOSS_TAGS = ("train/mean_loss", "train/loss")
"""Rankzero logs the loss over all ranks under the second name, and under the first if the model uses the second."""


class Line(NamedTuple):
    """The curve of one run in a panel.

    Args:
        number: Index of the run.
        x: Positions of the points.
        y: Their values, which may be NaN.
    """

    number: int
    x: Sequence[float]
    y: Sequence[float]


class Panel(NamedTuple):
    """A panel of the figure.

    Args:
        title: The metric.
        lines: The curves.
        averaged: Number of values in each point; 1 if all values are drawn.
    """

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
    """Returns the panels, and notes about curves that are missing.

    Args:
        compared: The runs.
        metrics: The metric of each panel; `TRAIN_LOSS` or a tag.
        kind: The horizontal axis, one of `X_AXES`.
    """
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
