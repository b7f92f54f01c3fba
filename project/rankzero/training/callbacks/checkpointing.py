"""Saves checkpoints at an interval and deletes surplus ones."""

import logging
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from weakref import proxy

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import Self

from rankzero.checkpoints.checkpoint_io import DirectoryCheckpointIO
from rankzero.checkpoints.manifest import SIGNATURE, Retention, checkpoints_in, file_of, read_manifest, step_of
from rankzero.checkpoints.safe_load import key_problem
from rankzero.checkpoints.write import remove_directory
from rankzero.distributed.devices import GatheredRows
from rankzero.distributed.monitoring.activity import CHECKPOINT
from rankzero.distributed.scheduler.durations import SAVE_INTERVAL, parse_duration
from rankzero.messages import RunError, SaveError, print_error
from rankzero.runs.directory import RunDirectory
from rankzero.training.callbacks.finite_weights import FiniteWeights
from rankzero.training.fit_loop import fit_loop_of
from rankzero.training.hooks import LoopCallback
from rankzero.training.strategies import strategy_of

CLOCK_STEPS = 16
"""Number of steps between two checks of the clock; each check is a gather, which the next step awaits."""


class Interval(NamedTuple):
    """Interval between saves in epochs, optimizer steps or seconds; 0 for the units that are not used."""

    epochs: int = 0
    steps: int = 0
    seconds: float = 0

    @classmethod
    def read(cls, text: str) -> Self:
        """Reads a text that matches `SAVE_INTERVAL`."""
        match = re.fullmatch(SAVE_INTERVAL, text)
        assert match, text
        number, unit = int(match[1]), match[2]
        if unit in ("s", "min", "h"):
            return cls(seconds=parse_duration(text))
        return cls(steps=number) if unit else cls(epochs=number)


def _computed(read: Callable[["CheckpointCallback"], Any]) -> Any:
    """Returns a property that ignores the initial value which ModelCheckpoint assigns."""
    return property(read, lambda self, value: None)


class CheckpointCallback(LoopCallback, ModelCheckpoint):
    """Saves at an interval and at the end of training, and keeps the newest checkpoints. All ranks must have it.

    It saves between steps, never within one. A save that is due at an epoch's last step happens at the end of the
    epoch, which follows immediately. Rank zero writes in the background, and deletes an older checkpoint only after it
    has written a newer one.

    The public attributes of Lightning's ModelCheckpoint describe the checkpoints on disk. To read one that names a
    checkpoint, rank zero waits for the newest save.

    Args:
        describe_run: Returns a checkpoint's description of the run, in plain types and independent of the rank.
        request_stop: Called with a reason, in another thread, if a checkpoint cannot be written; None to continue.
        weights: Determines which checkpoints are written; None for all.

    Attributes:
        last_bytes: Size of the last checkpoint on disk; None before the first save.
        error: Error of the newest save; None if the save succeeded.
    """

    def __init__(
        self,
        run: RunDirectory,
        interval: Interval,
        describe_run: Callable[[], dict[str, Any]],
        retention: Retention | None = None,
        request_stop: Callable[[str], None] | None = None,
        weights: FiniteWeights | None = None,
    ) -> None:
        self.run, self.interval, self.describe_run, self.weights = run, interval, describe_run, weights
        self.retention, self.request_stop = retention or Retention(), request_stop
        self._io = DirectoryCheckpointIO()
        super().__init__(
            monitor=self.retention.metric,
            save_last=True,
            mode=(self.retention.best or "min").partition(":")[0],
            every_n_epochs=interval.epochs,
            every_n_train_steps=interval.steps,
            train_time_interval=timedelta(seconds=interval.seconds) if interval.seconds else None,
        )
        self.last_bytes: int | None = None
        self.error: str | None = None
        self.saved_position: Any = None
        self.checked_step = 0
        self.clock_checked_at = 0.0
        self.is_due = self._has_warned = self._has_validated = self._has_checked_metric = self._is_over = False
        self._last_weights: dict[str, Tensor] = {}
        self._announced: GatheredRows | None = None

    @property
    def last_seconds(self) -> float | None:
        """Seconds that the last save took until it was on disk; None before the first save."""
        return self._io.last_seconds

    @property
    def _newest(self) -> Path | None:
        self._io.wait()
        return next(reversed(checkpoints_in(self.run.checkpoints, last_part=self.run.part)), None)

    @property
    def _best(self) -> Path | None:
        newest = self._newest
        return self.retention.best_in(self.run.checkpoints, self.run.part) if self.monitor else newest

    @property
    def _scores(self) -> dict[str, Tensor]:
        """Path of the best checkpoint -> its score; empty without a metric."""
        best = self._best if self.monitor else None
        return {_file_in(best): torch.tensor(self.retention.score_of(best))} if best else {}

    def _score_or(self, default: Any) -> Any:
        return next(iter(self._scores.values()), default)

    dirpath = _computed(lambda self: str(self.run.checkpoints.absolute()))
    last_model_path = _computed(lambda self: _file_in(self._newest))
    best_model_path = _computed(lambda self: _file_in(self._best))
    best_model_score = current_score = _computed(lambda self: self._score_or(None))
    best_k_models = _computed(lambda self: self._scores)
    kth_best_model_path = _computed(lambda self: next(iter(self._scores), ""))
    kth_value = _computed(lambda self: self._score_or(torch.tensor(torch.inf if self.mode == "min" else -torch.inf)))

    # These hooks of ModelCheckpoint save or hold a state; all others are replaced below.
    on_train_batch_end, on_train_epoch_end = Callback.on_train_batch_end, Callback.on_train_epoch_end
    on_exception, state_dict, load_state_dict = Callback.on_exception, Callback.state_dict, Callback.load_state_dict

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        io = trainer.strategy.checkpoint_io
        assert isinstance(io, DirectoryCheckpointIO)
        io.folder, io.on_committed, io.on_error = self.run.checkpoints, self._prune, self._report_error
        io.accepts = self._accepts
        self._io = io

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.checked_step = trainer.global_step
        self.saved_position = self._position(trainer) if trainer.ckpt_path else None
        self._is_over, self._last_weights, self._announced = False, {}, None
        self.clock_checked_at = time.monotonic()

    def needs(self, hook: str) -> bool:
        return hook != "on_step_done" or bool(self.interval.steps or self.interval.seconds)

    def on_step_done(self, trainer: Trainer) -> None:
        """Determines whether a save is due. All ranks must call."""
        self.is_due |= self._is_interval_over(trainer.global_step, trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._has_validated |= not trainer.sanity_checking

    def on_epoch_done(self, trainer: Trainer) -> None:
        self.is_due |= bool(self.interval.epochs) and trainer.current_epoch % self.interval.epochs == 0
        if self._has_checked_metric or (trainer.enable_validation and not self._has_validated):
            return
        self._has_checked_metric = True
        metric, logged = self.retention.metric, sorted(trainer.callback_metrics)
        if metric and metric not in logged:
            rank_zero_warn(
                f"rankzero: --keep_best {self.retention.best}: no metric of that name is logged, so that no checkpoint "
                f"is the best; logged: {', '.join(logged) or 'nothing'}"
            )

    def save_if_due(self, trainer: Trainer) -> None:
        """Saves, at a safe point, if a save is due or training is over. All ranks must call."""
        loop: Any = trainer.fit_loop.epoch_loop
        self._is_over = loop.may_be_done and (loop.done or loop.is_complete) and trainer.fit_loop.done
        if self.is_due or self._is_over:
            self.save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Waits for the last save; saves again if a callback replaced the weights in this hook. All ranks must call."""
        weights = _tensors_of(pl_module.state_dict())
        were_replaced = list(weights) == list(self._last_weights) and any(
            not _is_same(value, weights[name].cpu()) for name, value in self._last_weights.items()
        )
        if trainer.strategy.reduce_boolean_decision(were_replaced, all=False):
            self.saved_position, self._is_over = None, False
        self.save_and_wait(trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["rankzero"] = self.describe_run()
        if not trainer.is_global_zero:
            return  # only rank zero writes the checkpoint
        if self._is_over:
            weights = _tensors_of(checkpoint["state_dict"])
            self._last_weights = {name: value.detach().cpu().clone() for name, value in weights.items()}
        elif self._last_weights:
            checkpoint["weights_in_training"] = self._last_weights  # a resumed run of more epochs starts from these

    def save(self, trainer: Trainer) -> None:
        """Saves, unless the current position is already saved. All ranks must call."""
        self.is_due, self.clock_checked_at = False, time.monotonic()
        if self._write(trainer):
            self.saved_position = self._position(trainer)
            if trainer.is_global_zero and trainer.checkpoint_callback is self:
                for logger in trainer.loggers:
                    logger.after_save_checkpoint(proxy(self))

    def hold(self, trainer: Trainer) -> None:
        """Keeps a checkpoint in memory, for `write_held`, unless the position is already saved. All ranks must call."""
        self._io.holds = True
        try:
            self._write(trainer)
        finally:
            self._io.holds = False

    def write_held(self) -> None:
        """Writes the checkpoint that rank zero holds in memory, if any, in the background. Any thread may call."""
        self._io.write_held()

    def _write(self, trainer: Trainer) -> bool:
        """Passes a checkpoint to the checkpoint plugin; returns False if the position is already saved."""
        if self._position(trainer) == self.saved_position or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return False
        fit_loop_of(trainer).epoch_loop.flush_metrics()
        if trainer.is_global_zero:
            self.run.assert_owner()
            self.run.restore_record()
        trainer.save_checkpoint(self.run.checkpoint(trainer.global_step))
        return True

    def save_and_wait(self, trainer: Trainer) -> None:
        """Saves and waits until the checkpoint is on disk; retries a failed save once. All ranks must call.

        If the retry fails too, all ranks raise a SaveError.
        """
        self.save(trainer)
        if self._newest_error(trainer):
            self.saved_position = None
            self.save(trainer)
            if error := self._newest_error(trainer):
                raise SaveError(error)

    def _newest_error(self, trainer: Trainer) -> str | None:
        """Waits for the newest save and returns its error, if any. All ranks must call."""
        fit_loop_of(trainer).epoch_loop.activity.enter(CHECKPOINT)
        self._io.wait()
        return trainer.strategy.broadcast(self.error)

    def _is_interval_over(self, step: int, trainer: Trainer) -> bool:
        """Whether an interval ended between the previous call and this step. All ranks must call."""
        previous_step, self.checked_step = self.checked_step, step
        if self.interval.steps:
            return step // self.interval.steps > previous_step // self.interval.steps
        announced, self._announced = self._announced, None
        if self.interval.seconds and step // CLOCK_STEPS != previous_step // CLOCK_STEPS:
            is_over = time.monotonic() - self.clock_checked_at >= self.interval.seconds
            if trainer.world_size == 1:
                return is_over
            self._announced = strategy_of(trainer).begin_gather_rows(torch.tensor([float(is_over)]))
        return announced is not None and bool(announced.wait()[0, 0])  # rank zero's clock decides, one step later

    @staticmethod
    def _position(trainer: Trainer) -> tuple[int, Any]:
        """Returns the run's position; the end of an epoch is another position than the epoch's last step."""
        return trainer.global_step, fit_loop_of(trainer).position

    def _accepts(self, checkpoint: Mapping[str, Any], path: Path) -> bool:
        """Returns whether to write a checkpoint; called in the writer thread."""
        self.error = None
        return self.weights is None or self.weights.accepts(checkpoint["state_dict"], step_of(path))

    def _prune(self, saved: Path) -> None:
        """Deletes surplus checkpoints after a save; called in the writer thread."""
        self.error = None
        try:
            self.last_bytes = sum(file.stat().st_size for file in saved.iterdir())
            self.run.assert_owner()
            for path in self.retention.surplus(self.run.checkpoints):
                if path != saved:
                    remove_directory(path)
        except (OSError, RunError) as error:
            print_error(f"an older checkpoint could not be removed: {error}")
        manifest = read_manifest(saved)
        if manifest["needs"] and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(code_warning(manifest))

    def _report_error(self, path: Path, error: Exception) -> None:
        """Reports a failed save; called in the writer thread."""
        self.error, kept = f"{path.name} could not be saved: {error}", []
        with suppress(OSError):
            kept = checkpoints_in(self.run.checkpoints)
        text = f"{self.error}; the newest checkpoint is {kept[-1] if kept else 'none'}"
        if self.request_stop:
            self.request_stop("a failed save")
        print_error(f"{text}; {'stopping' if self.request_stop else 'continuing'} (--save_errors)")
        logging.getLogger("rankzero").error(text)


def code_warning(manifest: Mapping[str, Any]) -> str:
    """Returns the warning for checkpoints that can run code when read; it states who can read the checkpoints."""
    needs = ", ".join(manifest["needs"])
    contents = f"rankzero: the checkpoints of this run contain more than tensors and plain types ({needs})."
    advice = "Keep such objects out of state_dict and on_save_checkpoint"
    if SIGNATURE in manifest:
        return f"{contents} Your own runs resume from them; other users need --trust_checkpoint yes. {advice}"
    reason = f" ({problem})" if (problem := key_problem()) else ""
    return f"{contents} They are loaded only with --trust_checkpoint yes{reason}. {advice}, or start with that flag"


def _file_in(checkpoint: Path | None) -> str:
    """Returns the absolute path of a checkpoint's file; empty without a checkpoint."""
    return str(file_of(checkpoint).absolute()) if checkpoint else ""


def _tensors_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the tensors of a state dict, without other values that `get_extra_state` adds."""
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _is_same(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have the same shape, type and values; NaN equals NaN."""
    is_comparable = first.shape == second.shape and first.dtype == second.dtype
    return is_comparable and bool(((first == second) | ((first != first) & (second != second))).all())
