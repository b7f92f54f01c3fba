"""Newest values of a run that has not written its summary yet. Does not import torch."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rankzero.runs.reports.metric_choice import is_measurement
from rankzero.runs.reports.recorded.recorded_run import RecordedRun, saved_steps
from rankzero.runs.tensorboard.newest_values import newest_values


def with_live_values(run: RecordedRun) -> RecordedRun:
    """Returns the run with the newest values of its TensorBoard files, if its newest attempt has no summary yet."""
    if run.has_newest_summary:
        return run
    values = newest_values(run.path / "tensorboard")
    steps = [value.step + 1 for value in values.values()]  # values of the n-th step are logged at n - 1
    logged = {tag: value.number for tag, value in values.items()}
    live: dict[str, Any] = {
        "steps": max([*steps, saved_steps(run) or 0], default=None) or run.steps,
        "epochs": _count(logged, "x_axis/epoch", run.epochs),
        "samples": _count(logged, "x_axis/samples", run.samples),
        "samples_per_second": logged.get("train/samples_per_second", run.samples_per_second),
        "metrics": {**run.metrics, **{tag: number for tag, number in logged.items() if not is_measurement(tag)}},
    }
    return replace(run, **live)


def _count(logged: Mapping[str, float], tag: str, otherwise: int | None) -> int | None:
    number = logged.get(tag, math.nan)
    return int(number) if math.isfinite(number) else otherwise
