"""List of the callbacks that measure and log a run."""

from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import Callback

from rankzero.distributed.monitoring.activity import Activity
from rankzero.distributed.monitoring.monitor import Monitor
from rankzero.runs.directory import RunDirectory
from rankzero.runs.stored_config import Config
from rankzero.runs.tensorboard.logger import DurableTensorBoardLogger
from rankzero.tracking.figures.callback import RunFigures
from rankzero.tracking.measurements.interval_measurements import IntervalMeasurements
from rankzero.tracking.measurements.slow_ranks import SlowRanks
from rankzero.tracking.measurements.throughput import Throughput
from rankzero.tracking.profiling.callback import Profile
from rankzero.tracking.profiling.request import ProfileRequest
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
    """Returns the callbacks, in the order in which they are called.

    Args:
        run: Directory of the run.
        config: Returns the configuration of the run, once training begins.
        throughput: Counts samples and training time; already a callback of the Trainer.
        monitor: Provides the phase of the main thread, and the slow ranks.
        checkpointing: Saves checkpoints; None if nothing is saved.
        logger: The run's own logger; None if nothing is logged.
        log_system: Whether the user's loggers receive the same values.
        weights: Examines the loss.
    """
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

    Args:
        arguments: The arguments of the Trainer.
        run: Directory of the run.
        world_size: Number of processes.
        activity: What the main thread is doing.

    Raises:
        RequestError: The requested ranks do not exist.
    """
    request = ProfileRequest.read(arguments["profile"], arguments["profile_ranks"], world_size)
    return [Profile(run, request, activity)] if request else []
