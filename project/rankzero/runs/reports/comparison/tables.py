"""Settings in which runs differ, and their results, as tables. Does not import torch."""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rich.cells import cell_len

from rankzero.messages import print_line
from rankzero.runs.reports.comparison.compared_run import ComparedRun
from rankzero.runs.reports.recorded_run import RecordedRun
from rankzero.runs.reports.secrets import without_secrets
from rankzero.runs.reports.table import Column, Row, available_width, print_table
from rankzero.runs.reports.text import (
    MISSING,
    direction,
    distinct,
    duration,
    is_validation,
    number_text,
    unique_metrics,
)
from rankzero.runs.stored_config import SINGLE_START_ARGUMENTS, Config, flattened

_IGNORED = frozenset({*SINGLE_START_ARGUMENTS, "root", "start_timeout", "launcher", "requeue", "max_attempts"})
"""Settings that change where and how a run is started, and not what it computes."""

_ABSENT = object()


class Difference(NamedTuple):
    """A setting in which runs differ."""

    name: str
    values: Sequence[str]


def differences(configs: Sequence[Config]) -> list[Difference] | None:
    """Returns the settings in which runs differ; None if fewer than two configurations are known.

    Args:
        configs: Configuration of each run; {} if it is not known, which is no difference.
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
        if any(_differs(value, values[0]) for value in values[1:]):
            found.append(Difference(name, [_text(settings.get(name, _ABSENT)) for settings in shown]))
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


def _differs(value: Any, other: Any) -> bool:
    return value != other or isinstance(value, bool) != isinstance(other, bool)


def _text(value: Any) -> str:
    if value is _ABSENT:
        return MISSING
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


MAX_METRICS = 20
"""Number of metrics in the table, those on validation data first."""


class Result(NamedTuple):
    """A row of results."""

    name: str
    values: Sequence[str]
    best: frozenset[int] = frozenset()


def results(compared: Sequence[ComparedRun]) -> tuple[list[Result], list[str]]:
    """Returns the results of runs, and the names of metrics that are left out."""
    runs = [entry.run for entry in compared]
    rows = [
        Result("status", [entry.status.word for entry in compared]),
        Result("epochs", [_epochs(run) for run in runs]),
        Result("steps", [_counted(run.summary.get("steps")) for run in runs]),
        Result("samples", [_counted(run.summary.get("samples")) for run in runs]),
        Result("processes", [_counted(run.summary.get("world_size")) for run in runs]),
    ]
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
    if (epochs := run.summary.get("epochs")) is None:
        return MISSING
    return f"{epochs} of {run.max_epochs}" if (run.max_epochs or 0) > epochs else str(epochs)


def _counted(count: int | None) -> str:
    return MISSING if count is None else f"{count:,}"


_MAX_LABEL, _MIN_VALUE = 24, 13
"""Most columns for the names of settings and results, and least columns for the values of a run."""


def print_comparison(labels: Sequence[str], settings: Sequence[Difference] | None, rows: Sequence[Result]) -> None:
    """Prints the settings in which runs differ, and their results. Runs that do not fit have further tables."""
    setting_rows = [Row([setting.name, *setting.values]) for setting in settings or ()]
    if setting_rows:
        _print_blocks("setting", labels, setting_rows, is_number=False)
    elif settings is not None:
        print_line("all settings are equal\n")
    has_best = any(row.best for row in rows)
    _print_blocks("result", labels, [_row(row, has_best) for row in rows], is_number=True)
    if has_best:
        print_line("* best value of all runs")


def _print_blocks(title: str, labels: Sequence[str], rows: Sequence[Row], is_number: bool) -> None:
    label_width = min(_MAX_LABEL, max(cell_len(text) for text in [title, *(row.cells[0] for row in rows)]))
    room = max(_MIN_VALUE, available_width() - label_width)
    count = min(len(labels), max(1, room // (_MIN_VALUE + 2)))
    names = distinct(labels, max(_MIN_VALUE, room // count - 2))
    for begin in range(0, len(labels), count):
        block = range(begin, min(begin + count, len(labels)))
        columns = [Column(title, label_width), *(Column(names[index], _MIN_VALUE, is_number) for index in block)]
        cells = [
            Row(
                [row.cells[0], *(row.cells[index + 1] for index in block)],
                styles={index - begin + 1: row.styles[index + 1] for index in block if index + 1 in row.styles},
            )
            for row in rows
        ]
        print_table(columns, cells)
        print_line("")


def _row(row: Result, has_best: bool) -> Row:
    marks = ["*" if index in row.best else " " * has_best for index in range(len(row.values))]
    cells = [row.name, *(value + mark for value, mark in zip(row.values, marks, strict=True))]
    return Row(cells, styles={index + 1: "bold green" for index in row.best})
