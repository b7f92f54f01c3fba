"""Lists of the callbacks that measure, log and show a run."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ProgressBar

from rankzero.distributed.monitoring.activity import Activity
from rankzero.distributed.monitoring.monitor import Monitor
from rankzero.runs.directory import RunDirectory
from rankzero.runs.stored_config import Config
from rankzero.runs.tensorboard_logger import DurableTensorBoardLogger
from rankzero.tracking.figures.callback import RunFigures
from rankzero.tracking.measurements.interval_measurements import IntervalMeasurements
from rankzero.tracking.measurements.slow_ranks import SlowRanks
from rankzero.tracking.measurements.throughput import Throughput
from rankzero.tracking.profiling.callback import Profile, ProfileRequest
from rankzero.tracking.progress.bar import BarProgress
from rankzero.tracking.progress.plain_lines import PlainProgress
from rankzero.tracking.tensorboard_page import TensorBoardPage
from rankzero.training.callbacks.checkpointing import CheckpointCallback
from rankzero.training.callbacks.finite_weights import FiniteWeights


def tracking_callbacks(
    run: RunDirectory,
    config: Callable[[], Config],
    throughput: Throughput,
    monitor: Monitor,
    checkpointing: CheckpointCallback | None,
    logger: DurableTensorBoardLogger | None,
    log_system: bool,
    weights: FiniteWeights,
) -> list[Callback]:
    """Returns the callbacks, in the order in which they are called."""
    return [
        SlowRanks(monitor, logger),
        IntervalMeasurements(run, throughput, monitor, checkpointing, logger, log_system, weights),
        *([RunFigures(run, throughput, monitor.activity, logger, log_system)] if run.is_kept else []),
        *([TensorBoardPage(run, config, throughput.plan, logger)] if logger else []),
    ]


def profile_callbacks(
    arguments: Mapping[str, Any], run: RunDirectory, world_size: int, activity: Activity
) -> list[Callback]:
    """Returns the callback that profiles steps, or nothing if the user has not requested a profile.

    Raises:
        RequestError: The requested ranks do not exist.
    """
    request = ProfileRequest.read(arguments["profile"], arguments["profile_ranks"], world_size)
    return [Profile(run, request, activity)] if request else []


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
