"""A run stops at the last safe step before its time is up, as long as that can be foreseen."""

import math
import time

import psutil
from lightning.pytorch import Trainer

from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.scheduler.durations import seconds_of
from rankzero.distributed.scheduler.job import end_of_allocation
from rankzero.distributed.stop_and_failure.channel import ControlChannel
from rankzero.messages import TIME_IS_UP, Stopped, print_error
from rankzero.training.callbacks.checkpointing import CheckpointCallback
from rankzero.training.callbacks.wall_time import Kind, WallTime
from rankzero.training.fit_loop import fit_loop_of
from rankzero.training.hooks import LoopHooks

MEASURED_AT = 10
"""The step behind which a run whose time is limited saves for the first time, whatever `--save_every` says."""


def end_of_time(time_limit: str | None, launch: Launch) -> float:
    """When this attempt has to be over, by `time.monotonic`: by `time_limit` or the scheduler's, whichever is earlier.

    Args:
        time_limit: Counted from the start of this process; None for none.
        launch: Where this process stands. Rank zero alone knows; infinity for the others.
    """
    if launch.rank != 0:
        return math.inf
    ends = [end_of_allocation(launch) or math.inf]
    if time_limit:
        ends.append(psutil.Process().create_time() + seconds_of(time_limit))
    return min(ends) - time.time() + time.monotonic()


class TimeLimit(LoopHooks):
    """Measures steps, validations and saves, and has all ranks stop in time. All ranks must have it, behind what saves.

    Args:
        control_channel: Through which all are asked to stop.
        wall_time: What is left; rank zero's counts.
        saving: What saves; None where checkpoints are not wanted.
    """

    def __init__(self, control_channel: ControlChannel, wall_time: WallTime, saving: CheckpointCallback | None) -> None:
        self.control_channel, self.wall_time, self.saving = control_channel, wall_time, saving
        self._since = time.monotonic()
        self._plain_seconds = 0.0
        self._steps, self._limited = 0, False

    def needs(self, hook: str) -> bool:
        return hook == "on_ready" or self._limited

    def on_ready(self, trainer: Trainer) -> None:
        """All ranks must call.

        Raises:
            Stopped: On all ranks, where there is no time to begin.
        """
        is_over, self._limited = trainer.strategy.broadcast(
            (self.wall_time.is_over([Kind.PLAIN]), math.isfinite(self.wall_time.end))
        )
        if is_over:
            if trainer.is_global_zero:
                print_error("not a single step fits into the time that there is")
            raise Stopped(TIME_IS_UP)

    def on_step_done(self, trainer: Trainer) -> None:
        self._steps += 1
        # Behind an epoch's last step its end belongs to it.
        if not fit_loop_of(trainer).epoch_loop.is_complete:
            self._note(trainer, Kind.PLAIN)

    def on_epoch_done(self, trainer: Trainer) -> None:
        self._note(trainer, Kind.EPOCH)

    def on_safe_point(self, trainer: Trainer) -> None:
        """All ranks must call."""
        if self.saving and self._steps == MEASURED_AT:
            self.saving.save(trainer)  # so that it is known how long that takes
        self._since = time.monotonic()
        if self.saving and self.saving.last_seconds:
            self.wall_time.note_save(self.saving.last_seconds)
        batches = sum(trainer.num_val_batches)
        self.wall_time.validation_guess = batches * self._plain_seconds if math.isfinite(batches) else 0.0
        if self.wall_time.is_over(next_steps(trainer)):
            self.control_channel.request_stop(TIME_IS_UP)

    def _note(self, trainer: Trainer, kind: Kind) -> None:
        kind = Kind.VALIDATION if fit_loop_of(trainer).epoch_loop.has_validated else kind
        seconds = time.monotonic() - self._since
        self.wall_time.note_step(seconds, kind)
        if kind is Kind.PLAIN:
            self._plain_seconds = seconds


def next_steps(trainer: Trainer) -> list[Kind]:
    """What belongs to the next two steps; the second is the one after which all ranks can agree to stop.

    A margin for a validation at every step would stop runs earlier: with validations of 5 s and a limit of 60 s, they
    would take 0.75 as many steps (`benchmarks/tricks.py --which validation-schedule`).
    """
    loop, last, batches = fit_loop_of(trainer).epoch_loop, trainer.num_training_batches, trainer.accumulate_grad_batches
    done, kinds = 0 if loop.is_complete else loop.batches_done, []
    for _ in range(2):
        begun = int(last) if done >= last else 0  # the batches of the epoch after this one are counted on
        end = begun + int(min((done - begun) // batches * batches + batches, last))
        kinds.append(max((_kind(trainer, batch) for batch in range(done + 1, end + 1)), key=list(Kind).index))
        done = end
    return kinds


def _kind(trainer: Trainer, batch: int) -> Kind:
    """What belongs to a batch, counted from 1 in the epoch that is under way or comes next (lightning 2.6)."""
    loop, last, every = fit_loop_of(trainer).epoch_loop, trainer.num_training_batches, trainer.val_check_batch
    beyond, within = batch > last, batch - last if batch > last else batch
    plain, every_epochs = Kind.EPOCH if within == last else Kind.PLAIN, trainer.check_val_every_n_epoch
    if not trainer.enable_validation or (every_epochs and (trainer.current_epoch + beyond + 1) % every_epochs):
        return plain
    if every is None:  # they go by the clock
        return Kind.VALIDATION
    if every == math.inf:
        return Kind.VALIDATION if within == last else Kind.PLAIN
    if every_epochs is None:  # counted over all epochs
        progress = loop.batch_progress
        within = batch + progress.total.ready - (0 if loop.is_complete else progress.current.ready)
    return plain if within % every else Kind.VALIDATION
