"""List of the runs of a root. Does not import torch."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankzero.messages import RequestError, few, print_line, printable_line, quoted, similar_names
from rankzero.runs.recorded_run import RUN_FILE, STATUS_WORDS, RecordedRun, Status, is_run, modified_at
from rankzero.show.text_table import Column, Row, print_table
from rankzero.text import MISSING, age, compact, finite_or_none, main_metric, number_text, unique_metrics

MAX_NOTES = 12
"""Number of notes below the table."""

_STYLES = dict(zip(STATUS_WORDS, ("green", "cyan", "", "yellow", "red", "red", "magenta"), strict=True))


@dataclass(frozen=True)
class ListedRun:
    """A run in the list."""

    run: RecordedRun
    status: Status
    started: float
    sorted_by: str | None = None

    @property
    def metric(self) -> str | None:
        """The metric by which the list is sorted, or that matters most; None if the run has none."""
        return self.sorted_by or main_metric(unique_metrics(self.run.metrics), self.run.kept_best)


def runs_in(root: Path) -> list[tuple[float, Path]]:
    """Returns the runs of a root as pairs of modification time and path, the one started last at the end.

    Raises:
        OSError: The root cannot be read.
    """
    return sorted((modified_at(path / RUN_FILE) or modified_at(path), path) for path in root.iterdir() if is_run(path))


def why_not_listed(root: Path, error: OSError) -> str:
    """Returns why `runs_in` cannot read a root."""
    if isinstance(error, FileNotFoundError):
        return f"there is no folder {root.absolute()}; fit creates it with the first run"
    return f"{root.absolute()} cannot be read: {error.strerror}"


def unknown_run_error(asked: str, name: str, root: Path, instead: str) -> RequestError:
    """Returns the error for a run that does not exist, with a similar name or the newest names."""
    try:
        names = [path.name for _, path in reversed(runs_in(root))]
    except OSError as error:
        return RequestError(asked, why_not_listed(root, error), "--root DIR, where DIR contains runs")
    if not names:
        found = f"{root.absolute()} contains no runs"
        return RequestError(asked, found, "python launch/fit.py, or --root DIR, where DIR contains runs")
    similar = similar_names(name, names)
    listed = f"similar names: {', '.join(similar)}" if similar else f"the newest runs: {few(names, 8)}"
    found = f"there is no such run in {root.absolute()}; {listed}" if name else f"no run is named; {listed}"
    suggested = similar if name else names
    line = instead.format(quoted(suggested[0])) if suggested else "python launch/list.py"
    return RequestError(asked, found, line + root_flag(root))


def root_flag(root: Path) -> str:
    """Returns the flag for the folder of the runs, preceded by a space; empty for the default."""
    return "" if str(root) == "runs" else f" --root {quoted(str(root))}"


def print_list(listed: Sequence[ListedRun], root: Path, omitted: str = "") -> None:
    """Prints the table of runs, and notes on them."""
    metrics = {entry.metric for entry in listed if entry.metric is not None}
    common = metrics.pop() if len(metrics) == 1 else None
    metric = [Column(common, 8, is_number=True)] if common else [Column("metric", 6), Column("value", is_number=True)]
    counts = [Column(title, is_number=True) for title in ("epochs", "steps")]
    last = [Column(title, is_number=True) for title in ("samples/s", "age", "attempt")]
    columns = [Column("run", 12), Column("status"), *counts, *metric, *last]
    now = time.time()
    print_table(columns, [_row(entry, common is not None, now) for entry in listed])
    notes = [f"{entry.run.name}: {entry.status.note}" for entry in listed if entry.status.note]
    if len(notes) > MAX_NOTES:
        notes = [*notes[-MAX_NOTES:], f"{len(notes) - MAX_NOTES} more notes about older runs; --json prints all"]
    if omitted:
        notes.append(f"{root}: {omitted}")
    if notes:
        print_line("\n".join(["", *map(printable_line, notes)]))


def as_json(entry: ListedRun) -> dict[str, Any]:
    """Returns a run as an object for JSON, with None in place of values that are unknown or not finite."""
    run, metric, speed = entry.run, entry.metric, entry.run.summary.get("samples_per_second")
    metrics = finite_or_none(run.metrics)
    return {
        "name": run.name,
        "path": str(run.path),
        "status": entry.status.word,
        "note": entry.status.note,
        "archived": run.is_archived,
        "max_epochs": run.max_epochs,
        **{name: run.summary.get(name) for name in ("epochs", "steps", "samples", "world_size", "seconds")},
        "metric": None if metric is None else {"name": metric, "value": metrics.get(metric)},
        "metrics": metrics,
        "samples_per_second": speed if speed is not None and math.isfinite(speed) else None,
        "started": run.started,
        "attempts": len(run.attempts),
        **{name: run.newest.get(name) or "" for name in ("host", "job")},
    }


def _row(entry: ListedRun, has_common_metric: bool, now: float) -> Row:
    run, metric, epochs = entry.run, entry.metric, entry.run.summary.get("epochs")
    value = number_text(None if metric is None else run.metrics[metric])
    of = f"/{run.max_epochs}" if run.max_epochs and epochs is not None else ""
    cells = [
        run.name,
        entry.status.word,
        MISSING if epochs is None else f"{epochs}{of}",
        compact(run.summary.get("steps")),
        *([value] if has_common_metric else [metric or MISSING, value]),
        compact(run.summary.get("samples_per_second")),
        age(now - entry.started),
        str(len(run.attempts) or MISSING),
    ]
    return Row(cells, "dim" if run.is_archived else "", {1: _STYLES.get(entry.status.word, "magenta")})
