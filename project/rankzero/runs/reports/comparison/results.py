"""Results of runs, with the best value of each. Does not import torch."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rankzero.runs.reports.comparison.compared_run import ComparedRun
from rankzero.runs.reports.metric_choice import direction, is_validation
from rankzero.runs.reports.recorded.recorded_run import RecordedRun
from rankzero.runs.reports.shown_metrics import unique_metrics
from rankzero.runs.reports.text import MISSING, duration, number_text

MAX_METRICS = 20
"""Number of metrics in the table, those on validation data first."""


class Result(NamedTuple):
    """A row of results.

    Args:
        name: What the values are.
        values: The value of each run, as text.
        best: Indices of the runs with the best value; empty if no value is better than the others.
    """

    name: str
    values: Sequence[str]
    best: frozenset[int] = frozenset()


def results(compared: Sequence[ComparedRun]) -> tuple[list[Result], list[str]]:
    """Returns the results of runs, and the names of metrics that are left out."""
    runs = [entry.run for entry in compared]
    rows = [
        Result("status", [entry.status.word for entry in compared]),
        Result("epochs", [_epochs(run) for run in runs]),
        Result("steps", [_counted(run.steps) for run in runs]),
        Result("samples", [_counted(run.samples) for run in runs]),
        Result("processes", [_counted(run.world_size) for run in runs]),
    ]
    metrics = [unique_metrics(run.metrics) for run in runs]
    names = sorted({name for own in metrics for name in own}, key=lambda name: (not is_validation(name), name))
    for name in names[:MAX_METRICS]:
        values = [own.get(name) for own in metrics]
        kept_best = next((run.kept_best for run in runs if run.kept_best and run.kept_best[1] == name), None)
        rows.append(Result(name, [number_text(value) for value in values], best(values, direction(name, kept_best))))
    speeds = [run.samples_per_second for run in runs]
    rows.append(Result("samples/s", [number_text(speed) for speed in speeds], best(speeds, "max")))
    rows.append(Result("last attempt", [duration(run.seconds) for run in runs]))
    return rows, names[MAX_METRICS:]


def best(values: Sequence[float | None], better: str | None) -> frozenset[int]:
    """Returns the indices of the best values.

    Args:
        values: The values; None or NaN for a run without one.
        better: `max` or `min`; None if it is not known which values are better.
    """
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if better is None or len(set(finite)) < 2:
        return frozenset()
    choose: Callable[[Sequence[float]], float] = max if better == "max" else min
    return frozenset(index for index, value in enumerate(values) if value == choose(finite))


def _epochs(run: RecordedRun) -> str:
    if run.epochs is None:
        return MISSING
    return f"{run.epochs} of {run.max_epochs}" if (run.max_epochs or 0) > run.epochs else str(run.epochs)


def _counted(count: int | None) -> str:
    return MISSING if count is None else f"{count:,}"
