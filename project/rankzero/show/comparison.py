"""Comparison of runs: settings, results and curves. Does not import torch."""

import bisect
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.cells import cell_len

from rankzero.messages import print_line
from rankzero.runs.metrics_file import METRICS_FILE
from rankzero.runs.recorded_run import CONFIG_FILE, RecordedRun, Status, read_run, status_of, with_live_values
from rankzero.runs.secrets import without_secrets
from rankzero.runs.stored_config import SINGLE_START_ARGUMENTS, Config, flattened, read_config
from rankzero.show.report.curves import Curve, read_curves
from rankzero.show.text_table import Column, Row, available_width, print_table
from rankzero.text import (
    MISSING,
    direction,
    distinct,
    duration,
    is_measurement,
    is_training_loss,
    is_validation,
    main_metric,
    number_text,
    unique_metrics,
)

STEPS, SAMPLES, EPOCHS, SECONDS = "steps", "samples", "epochs", "seconds"
X_AXES = (STEPS, SAMPLES, EPOCHS, SECONDS)


def training_seconds(starts: Iterable[float], curves: Mapping[str, Curve], times: Sequence[float]) -> list[float]:
    """Returns the seconds of training until each time, without the time between the attempts of the run."""
    logged = sorted({time for curve in curves.values() for time in curve.times})
    starts = sorted(starts) or logged[:1]
    offsets, total = [], 0.0
    for start, following in zip(starts, [*starts[1:], math.inf], strict=True):
        offsets.append(total)
        last = bisect.bisect_left(logged, following) - 1
        total += max(0.0, logged[last] - start) if last >= 0 else 0.0
    attempts = [max(0, bisect.bisect_right(starts, time) - 1) for time in times]
    return [offsets[attempt] + max(0.0, time - starts[attempt]) for attempt, time in zip(attempts, times, strict=True)]


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
            return training_seconds(self.run.starts, self.curves, curve.times)
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
    compared = [
        ComparedRun(run.name, with_live_values(run), status_of(run), read_config(run.config), read_curves(run.path))
        for run in map(read_run, paths)
    ]
    labels = [entry.label for entry in compared]
    return [replace(entry, label=str(entry.run.path)) if labels.count(entry.label) > 1 else entry for entry in compared]


MAX_PANELS = 6
MAX_POINTS = 400
"""Number of points of a drawn curve; of a longer one, means of equally many values are drawn."""

TRAIN_LOSS = "train loss"


class Line(NamedTuple):
    """The curve of one run in a panel."""

    number: int
    x: Sequence[float]
    y: Sequence[float]


class Panel(NamedTuple):
    """A panel of the figure; `averaged` is the number of values in each point."""

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
    # Rankzero logs the loss over all ranks under the second name, and under the first if the model uses the second.
    for tag in ("train/mean_loss", "train/loss"):
        if tag in curves:
            return tag
    candidates = [tag for tag in curves if is_training_loss(tag) and not is_measurement(tag)]
    return min(candidates, key=lambda tag: (not tag.startswith("train"), len(tag), tag), default=None)


def panels(compared: Sequence[ComparedRun], metrics: Sequence[str], kind: str) -> tuple[list[Panel], list[str]]:
    """Returns the panels, and notes about curves that are missing."""
    notes, found = [], []
    for metric in metrics:
        lines, averaged = [], 1
        for number, entry in enumerate(compared):
            tag, label = loss_tag(entry.curves) if metric == TRAIN_LOSS else metric, entry.label
            curve = entry.curves.get(tag or "")
            if not entry.curves:
                continue
            if curve is None:
                notes.append(f"{label}: has no curve of {metric}")
                continue
            if curve.not_finite:
                notes.append(f"{label}: {curve.not_finite:,} of {curve.count:,} values of {metric} are not finite")
            size = -(-len(curve.values) // MAX_POINTS)
            averaged = max(averaged, size)
            positions = entry.positions(curve, kind)
            if not any(map(math.isfinite, positions)):
                notes.append(f"{label}: {metric} was logged without {kind}; --x steps draws it")
                continue
            lines.append(Line(number, means(positions, size), means(curve.values, size)))
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


_IGNORED = frozenset({*SINGLE_START_ARGUMENTS, "root", "start_timeout", "launcher", "requeue", "max_attempts"})
"""Settings that change where and how a run is started, and not what it computes."""

_ABSENT = object()


class Result(NamedTuple):
    """A setting or a result of all runs, with the indices of the best runs."""

    name: str
    values: Sequence[str]
    best: frozenset[int] = frozenset()


def differences(configs: Sequence[Config]) -> list[Result] | None:
    """Returns the settings in which runs differ; None if fewer than two configurations are known.

    A configuration that is not known is {}, which is no difference.
    """
    flat = [_flat(config) for config in configs]
    known = [settings for settings, config in zip(flat, configs, strict=True) if config]
    if len(known) < 2:
        return None
    shown = [without_secrets(settings) for settings in flat]
    names = dict.fromkeys(name for settings in known for name in settings)
    found = []
    for name in names:
        values = [settings.get(name) for settings in known]  # null and absent are equal
        if any(value != values[0] or isinstance(value, bool) != isinstance(values[0], bool) for value in values[1:]):
            found.append(Result(name, [_text(settings.get(name, _ABSENT)) for settings in shown]))
    return found


def _flat(config: Config) -> dict[str, Any]:
    """Returns the settings by name. The class of an object has the name of the object: `model` -> `MLP`."""
    return {
        name.removesuffix(".class_path"): value
        for name, value in flattened(_with_indices(config)).items()
        if name.removeprefix("trainer.") not in _IGNORED
    }


def _with_indices(value: Any) -> Any:
    """Replaces lists of lists or dictionaries by dictionaries from index to item, so that items are compared."""
    if isinstance(value, dict):
        return {key: _with_indices(item) for key, item in value.items()}
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        return {str(index): _with_indices(item) for index, item in enumerate(value)}
    return value


def _text(value: Any) -> str:
    if value is _ABSENT:
        return MISSING
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


MAX_METRICS = 20
"""Number of metrics in the table, those on validation data first."""


def results(compared: Sequence[ComparedRun]) -> tuple[list[Result], list[str]]:
    """Returns the results of runs, and the names of metrics that are left out."""
    runs, words = [entry.run for entry in compared], [entry.status.word for entry in compared]
    rows = [Result("status", words), Result("epochs", [_epochs(run) for run in runs])]
    for name, key in (("steps", "steps"), ("samples", "samples"), ("processes", "world_size")):
        counts = [run.summary.get(key) for run in runs]
        rows.append(Result(name, [MISSING if count is None else f"{count:,}" for count in counts]))
    metrics = [unique_metrics(run.metrics) for run in runs]
    names = sorted({name for own in metrics for name in own}, key=lambda name: (not is_validation(name), name))
    for name in names[:MAX_METRICS]:
        values = [own.get(name) for own in metrics]
        kept_best = next((run.kept_best for run in runs if run.kept_best and run.kept_best[1] == name), None)
        rows.append(Result(name, [number_text(value) for value in values], best(values, direction(name, kept_best))))
    speeds = [run.summary.get("samples_per_second") for run in runs]
    rows.append(Result("samples/s", [number_text(speed) for speed in speeds], best(speeds, "max")))
    rows.append(Result("last attempt", [duration(run.summary.get("seconds")) for run in runs]))
    return rows, names[MAX_METRICS:]


def best(values: Sequence[float | None], better: str | None) -> frozenset[int]:
    """Returns the indices of the best values; none if it is not known whether `max` or `min` is better."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if better is None or len(set(finite)) < 2:
        return frozenset()
    choose: Callable[[Sequence[float]], float] = max if better == "max" else min
    return frozenset(index for index, value in enumerate(values) if value == choose(finite))


def _epochs(run: RecordedRun) -> str:
    if (epochs := run.summary.get("epochs")) is None:
        return MISSING
    return f"{epochs} of {run.max_epochs}" if (run.max_epochs or 0) > epochs else str(epochs)


_MAX_LABEL, _MIN_VALUE = 24, 13
"""Most columns for the names of settings and results, and least columns for the values of a run."""


def print_comparison(labels: Sequence[str], settings: Sequence[Result] | None, rows: Sequence[Result]) -> None:
    """Prints the settings in which runs differ, and their results. Runs that do not fit have further tables."""
    if settings:
        _print_blocks("setting", labels, settings, is_number=False)
    elif settings is not None:
        print_line("all settings are equal\n")
    _print_blocks("result", labels, rows, is_number=True)
    if any(row.best for row in rows):
        print_line("* best value of all runs")


def _print_blocks(title: str, labels: Sequence[str], rows: Sequence[Result], is_number: bool) -> None:
    label_width = min(_MAX_LABEL, max(cell_len(text) for text in [title, *(row.name for row in rows)]))
    room = max(_MIN_VALUE, available_width() - label_width)
    count = min(len(labels), max(1, room // (_MIN_VALUE + 2)))
    names = distinct(labels, max(_MIN_VALUE, room // count - 2))
    for begin in range(0, len(labels), count):
        block = range(begin, min(begin + count, len(labels)))
        columns = [Column(title, label_width), *(Column(names[index], _MIN_VALUE, is_number) for index in block)]
        has_best = any(row.best for row in rows)
        print_table(columns, [_row(row, block, has_best) for row in rows])
        print_line("")


def _row(row: Result, block: Sequence[int], has_best: bool) -> Row:
    cells = [row.values[index] + ("*" if index in row.best else " " * has_best) for index in block]
    styles = {place: "bold green" for place, index in enumerate(block, 1) if index in row.best}
    return Row([row.name, *cells], styles=styles)
