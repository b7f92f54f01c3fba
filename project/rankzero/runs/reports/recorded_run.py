"""What the files of a run's directory record about the run. Does not import torch."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rankzero.runs.checkpoints.manifest import checkpoints_in, step_of
from rankzero.runs.metrics.metrics_file import newest_rows
from rankzero.runs.reports.shown_metrics import is_measurement, nan_for_none

RUN_FILE, SUMMARY_FILE, CONFIG_FILE = "run.json", "summary.json", "config.yaml"

ARCHIVED_NAME = re.compile(r".+\.before-[0-9]+")
"""Name of a run that `--resume never` has archived."""

# Settings are searched in the text of the configuration, because parsing YAML takes milliseconds per run.
_KEEP_BEST = re.compile(r"""^ *keep_best: *['"]?(min|max):([^\s'"]+)['"]? *$""", re.MULTILINE)
_AXES = {"epochs": "x_axis/epoch", "samples": "x_axis/samples"}
_MAX_EPOCHS = re.compile(r"^ *max_epochs: *([0-9]{1,15}) *$", re.MULTILINE)


@dataclass(frozen=True)
class RecordedRun:
    """A run, as its files record it. Numbers are those of the newest summary, None if it does not contain them.

    Args:
        path: Directory of the run.
        attempts: Number of attempts.
        starts: Start of each attempt in seconds since 1970, as far as they are known.
        started: Start of the newest attempt; None if unknown.
        host: Host of the newest attempt; empty if unknown.
        job: Job of the newest attempt, as given by the scheduler or torchrun; empty without one.
        status: Status in the summary: `finished`, `stopped`, `failed`; empty without a summary.
        summarized_attempt: Number of the attempt that wrote the summary; 0 without a summary.
        awaits_attempt: Whether the summary expects another attempt.
        epochs: Completed epochs.
        max_epochs: Requested epochs.
        steps: Optimizer steps.
        samples: Training samples over all ranks and attempts.
        world_size: Number of processes.
        samples_per_second: Speed of the attempt that wrote the summary.
        seconds: Duration of that attempt.
        metrics: Metrics; NaN for a value that is not finite.
        kept_best: `min` or `max` and the metric of `--keep_best`; None without the flag.
        problem: Why a file cannot be read; empty if all can be.
        note: Problem of the training that the summary states; empty without one.
    """

    path: Path
    attempts: int = 0
    starts: Sequence[float] = ()
    started: float | None = None
    host: str = ""
    job: str = ""
    status: str = ""
    summarized_attempt: int = 0
    awaits_attempt: bool = False
    epochs: int | None = None
    max_epochs: int | None = None
    steps: int | None = None
    samples: int | None = None
    world_size: int | None = None
    samples_per_second: float | None = None
    seconds: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    kept_best: tuple[str, str] | None = None
    problem: str = ""
    note: str = ""

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.path.name

    @property
    def is_archived(self) -> bool:
        """Whether `--resume never` has archived the run."""
        return ARCHIVED_NAME.fullmatch(self.name) is not None

    @property
    def has_newest_summary(self) -> bool:
        """Whether the newest attempt has written its summary."""
        return bool(self.status) and self.summarized_attempt >= self.attempts


def read_run(path: Path) -> RecordedRun:
    """Reads the files of a run. Files that are missing or damaged leave their fields empty."""
    problems: list[str] = []
    record, summary = _read_object(path / RUN_FILE, problems), _read_object(path / SUMMARY_FILE, problems)
    attempts: Sequence[Mapping[str, Any]] = record.get("attempts") or []
    newest = attempts[-1] if attempts else {}
    config = stored_config_text(path)
    kept, limit = _KEEP_BEST.search(config), _MAX_EPOCHS.search(config)
    max_epochs = summary.get("max_epochs") if summary else int(limit[1]) if limit else None
    counts = {name: summary.get(name) for name in ("epochs", "steps", "samples", "world_size")}
    speed = {name: summary.get(name) for name in ("samples_per_second", "seconds")}
    return RecordedRun(
        path,
        attempts=len(attempts),
        starts=[start for entry in attempts if (start := _seconds_since_1970(entry.get("started"))) is not None],
        started=_seconds_since_1970(newest.get("started") or record.get("created")),
        host=newest.get("host") or "",
        job=newest.get("job") or "",
        status=summary.get("status") or "",
        summarized_attempt=summary.get("attempts") or 0,
        awaits_attempt=summary.get("another_attempt", False),
        max_epochs=None if max_epochs == -1 else max_epochs,
        metrics=nan_for_none(summary.get("metrics") or {}),
        kept_best=(kept[1], kept[2]) if kept else None,
        problem="; ".join(problems),
        note=summary.get("problem") or "",
        **counts,
        **speed,
    )


def saved_steps(run: RecordedRun) -> int | None:
    """Returns the step of the run's newest checkpoint; None without one."""
    try:
        checkpoints = checkpoints_in(run.path / "checkpoints")
    except OSError:
        return None
    return step_of(checkpoints[-1]) if checkpoints else None


def is_run(path: Path) -> bool:
    """Returns whether a path is the directory of a run. An unreadable directory counts as one."""
    try:
        (path / RUN_FILE).lstat()
    except PermissionError:
        return os.path.isdir(path)  # noqa: PTH112 - `Path.is_dir` raises PermissionError
    except (OSError, ValueError):  # a name with a null character
        return False
    return True


def _read_object(file: Path, problems: list[str]) -> dict[str, Any]:
    """Reads a JSON object; if the file cannot be read, returns {} and appends the reason, unless it is missing."""
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        problems.append(f"{file.name} cannot be read: {error.strerror}")
        return {}
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        problems.append(f"{file.name} is damaged")
        return {}
    return content


def stored_config_text(path: Path) -> str:
    """Returns the configuration of a run as YAML; empty if it cannot be read."""
    try:
        return (path / CONFIG_FILE).read_text(errors="replace")
    except OSError:
        return ""


def _seconds_since_1970(text: str | None) -> float | None:
    return datetime.fromisoformat(text).timestamp() if text else None


def with_live_values(run: RecordedRun) -> RecordedRun:
    """Returns the run with the values that it has logged last, if its newest attempt has no summary yet."""
    if run.has_newest_summary:
        return run
    rows = newest_rows(run.path)
    steps = [row.step + 1 for row in rows]  # values of the n-th step are logged at n - 1
    logged = {tag: number for row in rows for tag, number in row.values.items()}
    counts = {name: int(logged[tag]) for name, tag in _AXES.items() if tag in logged}
    live: dict[str, Any] = {
        "steps": max([*steps, saved_steps(run) or 0], default=None) or run.steps,
        **counts,
        "samples_per_second": logged.get("train/samples_per_second", run.samples_per_second),
        "metrics": {**run.metrics, **{tag: number for tag, number in logged.items() if not is_measurement(tag)}},
    }
    return replace(run, **live)
