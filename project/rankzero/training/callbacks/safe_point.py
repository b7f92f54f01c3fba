"""What happens at a safe point: a due save, a stop before the time limit, an agreed stop, a copy of the state."""

import math
import time

from lightning.pytorch import Trainer

from rankzero.distributed.devices import synchronize
from rankzero.distributed.stop_and_failure.channel import ControlChannel
from rankzero.messages import TIME_LIMIT_REACHED, Stopped, print_error
from rankzero.training.callbacks.checkpointing import CheckpointCallback
from rankzero.training.callbacks.finite_weights import FiniteWeights
from rankzero.training.callbacks.time_limit import StepKind, WallTime, next_steps
from rankzero.training.fit_loop import fit_loop_of
from rankzero.training.hooks import LoopHooks
from rankzero.training.lightning_inside import SignalConnector

MEASURED_STEP = 10
"""Step after which a run with a time limit saves in order to measure a save, whatever `--save_every` specifies."""

SLOW_SECONDS = 2.0
"""A step that takes at least this long is slow. PBS by default kills a job 10 seconds after SIGTERM."""

COPY_SHARE = 0.02
"""Greatest share of the time of slow steps that the copies may take."""

CHECK_SECONDS = 10.0
"""Approximate time between two agreements on which steps are slow; each is a broadcast from rank zero."""

MAX_CHECK_STEPS = 256
"""Greatest number of steps between two agreements. The ranks also agree after each epoch."""


class SafePoint(LoopHooks):
    """Saves, stops, or copies the state in memory. All ranks must have it, after `RankAgreements`.

    At a safe point, after the hooks of the callbacks, in this order:

    - It saves, if a save is due.
    - It requests a stop, if the time limit is near.
    - It saves and stops the run, if all ranks have agreed to stop here.
    - It holds a checkpoint in memory, if the next step is slow, and writes it when a stop is requested. If the step,
      with its validation, takes longer than the time between SIGTERM and SIGKILL, the run is killed before it can
      save. Without slow steps nothing is copied.

    Args:
        end: Time of the monotonic clock at which the time limit ends, in seconds; infinity without a limit.

    Attributes:
        wall_time: The durations of steps and saves on this rank, and the time left.
    """

    in_trials = True

    def __init__(
        self,
        control_channel: ControlChannel,
        end: float,
        checkpoint_callback: CheckpointCallback | None,
        weights: FiniteWeights,
    ) -> None:
        self.control_channel, self.checkpoint_callback, self.weights = control_channel, checkpoint_callback, weights
        self.wall_time = WallTime(end)
        self._steps, self._has_limit, self._ends_epoch = 0, False, False
        self._step_started_at = self._step_seconds = math.inf
        self._slow: dict[StepKind, float] = {}
        self._copy_seconds = 0.0
        self._seconds_between_copies = self._seconds_since_copy = 0.0  # of slow steps; the same on all ranks
        self._steps_to_check = 3  # the first step may compile; a safe point precedes it

    def on_ready(self, trainer: Trainer) -> None:
        """Stops the run if the time left is too short to begin. All ranks must call.

        Raises:
            Stopped: The time is too short; raised on all ranks.
        """
        self._loop = fit_loop_of(trainer)
        if self._loop.is_trial:
            return
        self._step_started_at = math.inf
        if self.checkpoint_callback:
            self.control_channel.on_stop = self.checkpoint_callback.write_held
        is_over, self._has_limit = trainer.strategy.broadcast(
            (self.wall_time.is_over([StepKind.PLAIN]), math.isfinite(self.wall_time.end))
        )
        if is_over:
            if trainer.is_global_zero:
                print_error(
                    "the time limit is too short for a single step; set a longer --time_limit, or request more time"
                )
            raise Stopped(TIME_LIMIT_REACHED)

    def on_epoch_done(self, trainer: Trainer) -> None:
        self._ends_epoch = True

    def on_safe_point(self, trainer: Trainer) -> None:
        """Saves, stops or copies the state. All ranks must call.

        Raises:
            Stopped: The run stops; raised on all ranks.
            RunError: The last checkpoint could not be saved, or the weights are not finite; raised on all ranks.
        """
        checkpoints = None if self._loop.is_trial else self.checkpoint_callback
        if not self._loop.is_trial:
            self._measure_step()
        if checkpoints and (checkpoints.is_due or self._loop.epoch_loop.may_be_done):
            checkpoints.save_if_due(trainer)
        if self._has_limit and not self._loop.is_trial:
            self._stop_in_time(trainer)
        channel = self.control_channel
        channel.position += 1  # before the reason is read, see `ControlChannel`
        if channel.stop_reason is not None and channel.wait_for_stop_position() and not self._loop.done:
            if checkpoints:
                checkpoints.save_and_wait(trainer)
            self.weights.end_if_final(trainer)
            raise Stopped(channel.stop_reason)
        if checkpoints:
            self._hold_if_slow(checkpoints, trainer)
        self._ends_epoch = False
        self._step_started_at = time.monotonic()

    def _measure_step(self) -> None:
        """Records the seconds of the step before this safe point, including the end of an epoch and a validation."""
        seconds = time.monotonic() - self._step_started_at
        if seconds < 0:  # no step precedes
            return
        self._steps += 1
        kind = StepKind.EPOCH if self._ends_epoch else StepKind.PLAIN
        self.wall_time.steps[StepKind.VALIDATION if self._loop.epoch_loop.has_validated else kind].append(seconds)
        if not self._ends_epoch:
            self._step_seconds = seconds

    def _stop_in_time(self, trainer: Trainer) -> None:
        """Requests a stop if the next two steps and a save may not fit into the time left. All ranks must call."""
        wall_time = self.wall_time
        if self.checkpoint_callback and self._steps == MEASURED_STEP:
            self.checkpoint_callback.save(trainer)  # to measure how long a save takes
        if self.checkpoint_callback and self.checkpoint_callback.last_seconds:
            wall_time.note_save(self.checkpoint_callback.last_seconds)
        batches, plain_steps = sum(trainer.num_val_batches), wall_time.steps[StepKind.PLAIN]
        wall_time.validation_guess = batches * plain_steps[-1] if plain_steps and math.isfinite(batches) else 0.0
        if wall_time.is_over(next_steps(trainer)):
            self.control_channel.request_stop(TIME_LIMIT_REACHED)

    def _hold_if_slow(self, checkpoints: CheckpointCallback, trainer: Trainer) -> None:
        """Holds a checkpoint if the next step is slow. All ranks must call."""
        self._steps_to_check -= 1
        if self._steps_to_check <= 0 or self._ends_epoch:
            self._agree_on_slow_steps(trainer)
        if not self._slow or self._loop.done:
            return
        # Every kind of step includes a plain step.
        step_seconds = self._slow.get(next_steps(trainer)[0]) or self._slow.get(StepKind.PLAIN, 0.0)
        self._seconds_since_copy += step_seconds
        if step_seconds and self._seconds_since_copy >= self._seconds_between_copies:
            device = trainer.strategy.root_device
            synchronize(device)  # ends the steps before; below, it ends the copy
            began = time.monotonic()
            checkpoints.hold(trainer)
            synchronize(device)
            self._seconds_since_copy, self._steps_to_check = 0.0, 1
            self._copy_seconds = time.monotonic() - began

    def _agree_on_slow_steps(self, trainer: Trainer) -> None:
        """Broadcasts which kinds of steps are slow on rank zero, and after how many steps to do so again."""
        newest = {kind: seconds[-1] for kind, seconds in self.wall_time.steps.items() if seconds}
        slow = {kind: seconds for kind, seconds in newest.items() if seconds >= SLOW_SECONDS}
        steps = min(MAX_CHECK_STEPS, max(1, int(CHECK_SECONDS / max(self._step_seconds, 1e-6))))
        own = slow, self._copy_seconds, steps
        self._slow, copy_seconds, self._steps_to_check = trainer.strategy.broadcast(own)
        self._seconds_between_copies = copy_seconds / COPY_SHARE


class NoSignalConnector(SignalConnector):
    """Replacement for the Trainer's signal connector (lightning 2.6).

    Lightning's handler of SIGTERM calls a collective, so a signal to one of two ranks blocks both.
    """

    def register_signal_handlers(self) -> None:
        """Does nothing: `rankzero.distributed.process.stop_signals` handles all signals."""
