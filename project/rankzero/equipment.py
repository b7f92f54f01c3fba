"""What a Trainer is given once the run's directory is known: a logger, and what saves and stops the run."""

import logging
import math
import time
from typing import Any

import psutil
from lightning.pytorch import Trainer

from rankzero.distributed.control.channel import Lifeline
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.scheduler.job import end_of_allocation
from rankzero.messages import say
from rankzero.runs.checkpoints.retention import Retention
from rankzero.runs.resume import Decision, Request
from rankzero.runs.summary import metrics_of
from rankzero.runs.tensorboard import CurvesLogger
from rankzero.trainer import callback_of
from rankzero.training.callbacks.checkpointing import Interval, SaveCheckpoints
from rankzero.training.callbacks.found_settings import KeepFound
from rankzero.training.callbacks.stop import StopSafely
from rankzero.training.callbacks.time_limit import MindTheTime
from rankzero.training.callbacks.wall_time import WallTime, seconds_of
from rankzero.training.fit_loop import fit_loop_of
from rankzero.training.saved_state.sample_order import order_of
from rankzero.training.strategies import strategy_of


def equip(trainer: Trainer, request: Request, decision: Decision, launch: Launch, lifeline: Lifeline) -> None:
    """Gives the Trainer what had to wait. All ranks must call.

    Args:
        trainer: The Trainer.
        request: The command line.
        decision: The run's directory, and what is carried on from.
        launch: Where this process stands.
        lifeline: Through which all ranks agree to stop.
    """
    _set_loggers(trainer, request, decision)
    callback_of(trainer, KeepFound).resumes = decision.checkpoint is not None
    saving = None
    if request.config_init.trainer.enable_checkpointing is not False:
        saving = _saving(trainer, request, decision, lifeline)
        trainer.callbacks.append(saving)  # type: ignore[attr-defined]
    wall_time = WallTime(_end_of_time(request, launch) if launch.rank == 0 else math.inf)
    fit_loop_of(trainer).hooks += [MindTheTime(lifeline, wall_time, saving), StopSafely(lifeline, saving)]


def _set_loggers(trainer: Trainer, request: Request, decision: Decision) -> None:
    asked, run = request.config_init.trainer.logger, decision.run
    if asked in (None, True):
        # What a lost attempt logged behind the checkpoint is hidden, so that there is one curve. What belongs to the
        # n-th step is logged at n - 1 (lightning 2.6).
        purge: dict[str, Any] = {"purge_step": decision.step} if decision.checkpoint or run.attempt > 1 else {}
        trainer.loggers = [CurvesLogger(run.path, name="", version="tensorboard", default_hp_metric=False, **purge)]
    elif asked:
        trainer.loggers = asked if isinstance(asked, list) else [asked]


def _saving(trainer: Trainer, request: Request, decision: Decision, lifeline: Lifeline) -> SaveCheckpoints:
    run, config = decision.run, request.config
    sharding = strategy_of(trainer).sharding

    def record() -> dict[str, Any]:
        return {
            "run": run.name,
            "id": run.id,
            "attempt": run.attempt,
            "metrics": metrics_of(trainer),
            "config": request.config_text,
            "order": order_of(trainer, sharding),
        }

    def cannot_save(what: str) -> None:
        """Tells a person at once, in the thread that could not write."""
        stops = config.save_errors == "stop"
        if stops:
            lifeline.ask_to_stop("a checkpoint that cannot be written")
        say(f"{what}; {'stopping' if stops else 'going on'} (--save_errors)")
        logging.getLogger("rankzero").error(what)

    retention = Retention(config.keep, config.keep_best)
    every = Interval.read(config.save_every)
    return SaveCheckpoints(run.checkpoints, every, record, retention, cannot_save, run.check_still_ours)


def _end_of_time(request: Request, launch: Launch) -> float:
    """When this attempt has to be over, by `time.monotonic`: by `--time_limit`, or the scheduler's own."""
    limit, ends = request.config.time_limit, [end_of_allocation(launch) or math.inf]
    if limit:
        ends.append(psutil.Process().create_time() + seconds_of(limit))
    return min(ends) - time.time() + time.monotonic()
