"""Stops a run at the last safe point before its time limit, as far as step durations can be predicted."""

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
"""Step after which a run with a time limit saves in order to measure a save, whatever `--save_every` specifies."""


def end_of_time(time_limit: str | None, launch: Launch) -> float:
    """Returns when this attempt must end: at `time_limit` or at the end of the scheduler's job, whichever is earlier.

    Args:
        time_limit: Duration since the start of this process, such as `2h`; None for no limit.
        launch: The rank and the launcher of this process.

    Returns:
        A time of `time.monotonic`, in seconds; infinity without a limit and on all ranks but zero, which decides.
    """
    if launch.rank != 0:
        return math.inf
    ends = [end_of_allocation(launch) or math.inf]
    if time_limit:
        ends.append(psutil.Process().create_time() + seconds_of(time_limit))
    return min(ends) - time.time() + time.monotonic()


class TimeLimit(LoopHooks):
    """Measures steps, validations and saves, and stops all ranks before the time limit.

    All ranks must have it, after the checkpoint callback.

    Args:
        control_channel: Transmits the request to stop to all ranks.
        wall_time: Decides whether the time left suffices; only rank zero has a limit.
        saving: The checkpoint callback; None if checkpoints are disabled.
    """

    def __init__(self, control_channel: ControlChannel, wall_time: WallTime, saving: CheckpointCallback | None) -> None:
        self.control_channel, self.wall_time, self.saving = control_channel, wall_time, saving
        self._since = time.monotonic()
        self._plain_seconds = 0.0
        self._steps, self._limited = 0, False

    def needs(self, hook: str) -> bool:
        return hook == "on_ready" or self._limited

    def on_ready(self, trainer: Trainer) -> None:
        """Stops the run if the time left is too short to begin. All ranks must call.

        Raises:
            Stopped: The time is too short; raised on all ranks.
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
        # The last step of an epoch is measured together with the end of the epoch.
        if not fit_loop_of(trainer).epoch_loop.is_complete:
            self._note(trainer, Kind.PLAIN)

    def on_epoch_done(self, trainer: Trainer) -> None:
        self._note(trainer, Kind.EPOCH)

    def on_safe_point(self, trainer: Trainer) -> None:
        """Requests a stop if the next two steps and a save may not fit into the time left. All ranks must call."""
        if self.saving and self._steps == MEASURED_AT:
            self.saving.save(trainer)  # to measure how long a save takes
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
    """Returns the kinds of the next two steps; all ranks may be able to stop only after the second one.

    Reserving time for a validation in every step would stop runs earlier. With validations of 5 s and a limit of 60 s,
    runs would take 0.75 times as many steps (`benchmarks/tricks.py --which validation-schedule`).
    """
    loop, last, batches = fit_loop_of(trainer).epoch_loop, trainer.num_training_batches, trainer.accumulate_grad_batches
    done, kinds = 0 if loop.is_complete else loop.batches_done, []
    for _ in range(2):
        begun = int(last) if done >= last else 0  # the count continues through the next epoch
        end = begun + int(min((done - begun) // batches * batches + batches, last))
        kinds.append(max((_kind(trainer, batch) for batch in range(done + 1, end + 1)), key=list(Kind).index))
        done = end
    return kinds


def _kind(trainer: Trainer, batch: int) -> Kind:
    """Returns the kind of a batch, counted from 1 in the current epoch or continued into the next (lightning 2.6)."""
    loop, last, every = fit_loop_of(trainer).epoch_loop, trainer.num_training_batches, trainer.val_check_batch
    beyond, within = batch > last, batch - last if batch > last else batch
    plain, every_epochs = Kind.EPOCH if within == last else Kind.PLAIN, trainer.check_val_every_n_epoch
    if not trainer.enable_validation or (every_epochs and (trainer.current_epoch + beyond + 1) % every_epochs):
        return plain
    if every is None:  # validations are due at intervals of time
        return Kind.VALIDATION
    if every == math.inf:
        return Kind.VALIDATION if within == last else Kind.PLAIN
    if every_epochs is None:  # validations are due at intervals over all epochs
        progress = loop.batch_progress
        within = batch + progress.total.ready - (0 if loop.is_complete else progress.current.ready)
    return plain if within % every else Kind.VALIDATION
