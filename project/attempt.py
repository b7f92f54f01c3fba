"""One attempt at a run: where its files are, what it carries on from, and what is known of it at the end."""

import logging
import math
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from lightning.pytorch import Trainer
from torch import Tensor
from typing_extensions import Self

from project import report
from project.callbacks.ledger import KeepLedger
from project.callbacks.stopping import StopSafely
from project.callbacks.throughput import Throughput
from project.callbacks.time_limit import MindTheTime
from project.checkpoints.manifest import newest_valid
from project.checkpoints.retention import Retention
from project.checkpoints.saving import Interval, SaveCheckpoints
from project.environments.allocation import end_of_allocation
from project.errors import CannotStart, RequestError, Stopped, TakenOverError, mistake
from project.loops import fit_loop_of
from project.next_attempt import next_attempt
from project.resume import Request, agreed, decide
from project.sampling.training_batches import Position
from project.strategies import strategy_of
from project.team import Team
from project.tensorboard import CurvesLogger
from project.trainer import callback_of
from project.wall_time import WallTime, seconds_of
from project.world import World


class Attempt:
    """One attempt at a run, a context manager around `trainer.fit`. All ranks must make one.

    Args:
        request: The command line.
        trainer: The Trainer; it is given a logger and the callback that saves.
        world: How many processes there are, and on what.
        team: All processes, and where this one stands.

    Raises:
        CannotStart: On every rank, where rank zero finds that the run cannot be begun or carried on.
    """

    def __init__(self, request: Request, trainer: Trainer, world: World, team: Team) -> None:
        self.request, self.trainer, self.world, self.launch = request, trainer, world, team.launch
        self.lifeline, launch = team.lifeline, team.launch
        trainer.strategy.setup_environment()
        self.decision = agreed(trainer.strategy, launch.rank, lambda: decide(request, trainer, launch))
        self.run, self.checkpoint = self.decision.run, self.decision.checkpoint
        self.already_finished = self.decision.already_finished
        self.first_step = int(self.decision.manifest.get("step") or 0)
        self.sharding = strategy_of(trainer).sharding
        self.throughput: Throughput = callback_of(trainer, Throughput)
        self.ledger: KeepLedger = callback_of(trainer, KeepLedger)
        self._log = logging.getLogger("rankzero")
        if launch.rank == 0:
            for note in self.decision.notes:
                print(f"rankzero: {note}", flush=True)

    @property
    def begun(self) -> bool:
        """Whether an optimiser step has been taken."""
        return bool(self.trainer.global_step > self.first_step)

    def __enter__(self) -> Self:
        self._started = time.perf_counter()
        try:
            self._keep_order()
        except CannotStart:
            if self.launch.rank == 0:
                self.run.discard_attempt()
            raise
        self._open_log()
        self.lifeline.last_words = self._last_words
        self._attach()
        line = report.start_line(self.run, self.world, self.launch, self.checkpoint)
        self._log.info("attempt %d: %s", self.run.attempt, line)
        if self.launch.rank == 0:
            print(f"rankzero: {line}", flush=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Stopped):
            self._log.info("stopped behind step %d: %s", self.trainer.global_step, error)
        elif error is not None:
            self._log.error("".join(traceback.format_exception(error)))
        impossible = not self.begun and isinstance(error, Exception) and mistake(error) is not None
        for handler in list(self._log.handlers):
            handler.close()
            self._log.removeHandler(handler)
        if self.launch.rank != 0:
            return
        if isinstance(error, TakenOverError):
            return
        if impossible:
            self.run.discard_attempt()
            return
        summary = self._summarise(
            "finished" if error is None else "stopped" if isinstance(error, Stopped) else "failed"
        )
        report.print_table(summary, self.run, self.world)
        if isinstance(error, Stopped):
            config, steps = self.request.config, self.trainer.global_step - self.first_step
            line = next_attempt(self.run, self.launch, error, config.requeue, config.max_attempts, steps)
            if line:
                print(f"rankzero: {line}", file=sys.stderr, flush=True)

    def _open_log(self) -> None:
        handler = logging.FileHandler(self.run.log(self.launch.rank or 0))
        handler.handleError = lambda record: None  # type: ignore[method-assign]  # a full disk: it is told elsewhere
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self._log.addHandler(handler)
        self._log.setLevel(logging.INFO)
        self._log.propagate = False

    def _last_words(self, cause: str) -> None:
        """For a process that is ended because another one has failed."""
        self._log.error(cause)
        if self.launch.rank == 0:
            self._summarise("failed")

    def _summarise(self, status: str) -> dict[str, Any]:
        summary = self.summary(status)
        self.run.write_summary(summary)
        return summary

    def summary(self, status: str) -> dict[str, Any]:
        """What `summary.json` says: of the whole run, but `seconds` and `samples_per_second` of this attempt."""
        saved, _ = newest_valid(self.run.checkpoints)
        return {
            "run": self.run.name,
            "status": status,
            "epochs": self.trainer.current_epoch,
            "steps": self.trainer.global_step,
            "samples": self.throughput.samples,
            "world_size": self.world.size,
            "nodes": self.world.nodes,
            "devices": self.world.devices,
            "launcher": self.launch.launcher,
            "accelerator": self.world.accelerator,
            "backend": self.world.backend if self.world.size > 1 else None,
            "metrics": self._metrics(),
            "samples_per_second": round(self.throughput.samples_per_second, 1),
            "seconds": round(time.perf_counter() - self._started, 3),
            "ledger": self.ledger.statements,
            "attempts": self.run.attempt,
            "checkpoint": self._within_run(saved),
            "best": self._within_run(Retention(best=self.request.config.keep_best).best_in(self.run.checkpoints)),
            "max_epochs": self.trainer.max_epochs,
            "max_steps": self.trainer.max_steps,
        }

    def _within_run(self, checkpoint: Path | None) -> str | None:
        return str(checkpoint.relative_to(self.run.path)) if checkpoint else None

    def _metrics(self) -> dict[str, float | None]:
        return {name: _number(value) for name, value in sorted(self.trainer.callback_metrics.items())}

    def _keep_order(self) -> None:
        """A run that is carried on keeps its order: global batch, seed and data; another one would repeat samples.

        Raises:
            RequestError: Another order was asked for, and not accepted.
        """
        sharding, manifest = self.sharding, self.decision.manifest
        kept = (manifest.get("rankzero") or {}).get("order")
        if not kept:
            sharding.start = [Position(manifest["epoch"])] if manifest.get("epoch") else []
            return
        sizes, anew = kept["global_batch_sizes"], "--resume never to start anew"
        if sharding.seed != kept["seed"]:
            raise RequestError(
                f"--seed {sharding.seed}",
                f"run {self.run.name} carries on with {kept['seed']}",
                f"--seed {kept['seed']}, or {anew}",
            )
        sharding.start = [Position(**position) for position in kept["positions"]]
        sharding.kept_data = kept["data"]
        if "global_batch_size" in (self.request.config.accept_changed or ""):
            if len(sizes) > 1:  # loaders that would not stay side by side
                sharding.start = [Position(position.epoch) for position in sharding.start]
            return
        sharding.kept_sizes = sizes
        asked = (sharding.batch_size or 0) * sharding.world_size * sharding.micro_batches
        if asked not in (0, sizes[0]) and self.launch.rank == 0:
            print(
                f"rankzero: --batch_size {sharding.batch_size} would be {asked:,} samples a step; run {self.run.name} "
                f"carries on with {sizes[0]:,}, or else with --accept_changed global_batch_size",
                flush=True,
            )
        if sharding.global_batch_size not in (None, sizes[0]):
            raise RequestError(
                f"--global_batch_size {sharding.global_batch_size}",
                f"run {self.run.name} carries on with {sizes[0]}",
                f"--global_batch_size {sizes[0]}, or --accept_changed global_batch_size to change it, or {anew}",
            )

    def _attach(self) -> None:
        """Gives the Trainer what had to wait for the run's directory."""
        settings, trainer = self.request.config_init.trainer, self.trainer
        if settings.logger in (None, True):
            # What a lost attempt logged behind the checkpoint is hidden, so that there is one curve. What belongs to
            # the n-th step is logged at n - 1 (lightning 2.6).
            purge: dict[str, Any] = {"purge_step": self.first_step} if self.checkpoint or self.run.attempt > 1 else {}
            logger = CurvesLogger(self.run.path, name="", version="tensorboard", default_hp_metric=False, **purge)
            trainer.loggers = [logger]
        elif settings.logger:
            trainer.loggers = settings.logger if isinstance(settings.logger, list) else [settings.logger]
        saving = None
        if settings.enable_checkpointing is not False:
            every = Interval.read(self.request.config.save_every)
            retention = Retention(self.request.config.keep, self.request.config.keep_best)
            saving = SaveCheckpoints(
                self.run.checkpoints, every, self._record, retention, self._cannot_save, self.run.check_still_ours
            )
            trainer.callbacks.append(saving)  # type: ignore[attr-defined]
        wall_time = WallTime(self._end_of_time() if self.launch.rank == 0 else math.inf)
        trainer.callbacks.append(MindTheTime(self.lifeline, wall_time, saving))  # type: ignore[attr-defined]
        trainer.callbacks.append(StopSafely(self.lifeline, saving))  # type: ignore[attr-defined]

    def _cannot_save(self, what: str) -> None:
        """Tells a person at once, in the thread that could not write."""
        stops = self.request.config.save_errors == "stop"
        print(f"rankzero: {what}; {'stopping' if stops else 'going on'} (--save_errors)", file=sys.stderr, flush=True)
        self._log.error(what)
        if stops:
            self.lifeline.ask_to_stop("a checkpoint that cannot be written")

    def _end_of_time(self) -> float:
        """When this attempt has to be over, by `time.monotonic`: by `--time_limit`, or the scheduler's own."""
        limit, ends = self.request.config.time_limit, [end_of_allocation(self.launch) or math.inf]
        if limit:
            ends.append(psutil.Process().create_time() + seconds_of(limit))
        return min(ends) - time.time() + time.monotonic()

    def _record(self) -> dict[str, Any]:
        return {
            "run": self.run.name,
            "id": self.run.id,
            "attempt": self.run.attempt,
            "metrics": self._metrics(),
            "config": self.request.config_text,
            "order": self._order(),
        }

    def _order(self) -> dict[str, Any] | None:
        """What the order of samples is made of, and how far it has come. Free of ranks."""
        sharding, loop = self.sharding, fit_loop_of(self.trainer)
        if sharding.order is None:
            return None
        return {
            "positions": [vars(loop.position_of(order)) for order in sharding.training],
            "seed": sharding.seed,
            "global_batch_sizes": [one.global_batch_size for one in sharding.training],
            "data": sharding.data,
        }


def _number(value: Tensor) -> float | None:
    """A metric as JSON can hold it: what is no finite number is null."""
    number = float(value)
    return number if math.isfinite(number) else None
