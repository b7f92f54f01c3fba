"""Chooses how the progress of a run is shown."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ProgressBar

from rankzero.tracking.progress.bar import BarProgress
from rankzero.tracking.progress.plain_lines import PlainProgress

JOB_LAUNCHERS = ("mpi", "pbs", "slurm")
"""Launchers whose output is plain lines: it usually goes to a file, although mpirun provides a pseudo-terminal."""


def progress_callbacks(
    lightning_arguments: Mapping[str, Any], callbacks: Sequence[Callback], launcher: str
) -> list[Callback]:
    """Returns the progress callback of a Trainer; none if the user provides a progress bar or has disabled it."""
    has_bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
    if has_bar or lightning_arguments.get("barebones") or lightning_arguments.get("enable_progress_bar") is False:
        return []
    has_terminal = sys.stdout is not None and sys.stdout.isatty() and launcher not in JOB_LAUNCHERS
    return [BarProgress() if has_terminal else PlainProgress()]


def without_progress(lightning_arguments: Mapping[str, Any], callbacks: Sequence[Callback]) -> dict[str, Any]:
    """Returns the arguments for Lightning's Trainer of a quiet run: no progress bar and no table of the model.

    A progress bar among the user's callbacks stays, and so does a table that the user has requested.
    """
    quiet = dict(lightning_arguments)
    if not any(isinstance(callback, ProgressBar) for callback in callbacks):
        quiet["enable_progress_bar"] = False
    if quiet.get("enable_model_summary") is None and not quiet.get("barebones"):
        quiet["enable_model_summary"] = False
    return quiet
