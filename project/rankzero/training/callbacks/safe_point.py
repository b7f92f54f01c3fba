"""What happens at a safe point: a due save, a stop before the time limit, an agreed stop, a copy of the state."""

import math
import time
from collections import deque
from collections.abc import Sequence
from enum import IntEnum

from lightning.pytorch import Trainer

from rankzero.distributed.devices import synchronize
from rankzero.distributed.stop_and_failure.channel import ControlChannel
from rankzero.messages import TIME_LIMIT_REACHED, Stopped, print_error
from rankzero.training.callbacks.checkpointing import CheckpointCallback
from rankzero.training.callbacks.finite_weights import FiniteWeights
from rankzero.training.fit_loop import fit_loop_of
from rankzero.training.hooks import LoopHooks
from rankzero.training.validations import ValidationSchedule

REMEMBERED_STEPS = 32
"""Number of recent steps of each kind to remember. The slowest is the estimate, until it is no longer among them."""

UNMEASURED_SAVE_SECONDS = 5.0
"""Estimate for a save before one has been measured."""

MARGIN_SECONDS = 10.0
"""Seconds that must remain."""

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


class StepKind(IntEnum):
    """What a step includes in addition to its batches: nothing, the end of an epoch, or a validation."""

    PLAIN = 0
    EPOCH = 1
    VALIDATION = 2  # and perhaps the end of an epoch


class TimeBudget:
    """Decides from measured durations whether the next steps and a save fit into the time left.

    Attributes:
        steps: Kind -> seconds of the newest steps, each with everything that belongs to its kind, but without a save.
        longest_save: Seconds of the longest save; 0 before the first one.
        validation_guess: Estimate for a validation before one has been measured, in seconds.
    """

    def __init__(self, end: float) -> None:
        self.end = end
        self.validation_guess = self.longest_save = 0.0
        self.steps: dict[StepKind, deque[float]] = {kind: deque(maxlen=REMEMBERED_STEPS) for kind in StepKind}

    @property
    def seconds_for_steps(self) -> float:
        """Seconds until a save must begin. Twice the longest is reserved, since file systems are slow at times."""
        return self.end - time.monotonic() - (2 * self.longest_save or UNMEASURED_SAVE_SECONDS) - MARGIN_SECONDS

    def is_over(self, next_steps: Sequence[StepKind]) -> bool:
        """Whether the next steps and a save after them may take longer than the time left."""
        return self.seconds_for_steps < sum(map(self._step, next_steps))

    def _step(self, kind: StepKind) -> float:
        if self.steps[kind]:
            return max(self.steps[kind])
        if kind is StepKind.VALIDATION:
            return self._step(StepKind.EPOCH) + self.validation_guess
        return self._step(StepKind.PLAIN) if kind is StepKind.EPOCH else 0.0


def next_steps(trainer: Trainer) -> list[StepKind]:
    """Returns the kinds of the next two steps; all ranks may be able to stop only after the second one.

    Reserving time for a validation in every step would stop runs earlier. With validations of 5 s and a limit of 60 s,
    runs would take 0.75 times as many steps (`benchmarks/tricks.py --which validation-schedule`).
    """
    loop, schedule = fit_loop_of(trainer).epoch_loop, ValidationSchedule.of(trainer)
    batches_per_step, epoch_batches = trainer.accumulate_grad_batches, schedule.epoch_batches
    done, kinds = 0 if loop.is_complete else loop.batches_done, []
    earlier_batches = loop.batch_progress.total.ready - done
    for _ in range(2):
        epoch_start = int(epoch_batches) if done >= epoch_batches else 0  # the count continues through the next epoch
        steps = (done - epoch_start) // batches_per_step
        end = epoch_start + int(min((steps + 1) * batches_per_step, epoch_batches))
        kind = StepKind.EPOCH if end == epoch_start + epoch_batches else StepKind.PLAIN
        validates = schedule.count(trainer.current_epoch, earlier_batches, done, end) > 0
        kinds.append(StepKind.VALIDATION if validates else kind)
        done = end
    return kinds


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
    """

    def __init__(
        self,
        control_channel: ControlChannel,
        end: float,
        checkpoint_callback: CheckpointCallback | None,
        weights: FiniteWeights,
    ) -> None:
        self.control_channel, self.checkpoint_callback, self.weights = control_channel, checkpoint_callback, weights
        self.time_budget = TimeBudget(end)
        self._steps, self._has_limit, self._ends_epoch = 0, False, False
        self._step_started_at = self._step_seconds = math.inf
        self._slow: dict[StepKind, float] = {}
        self._copy_seconds = 0.0
        self._seconds_between_copies = self._seconds_since_copy = 0.0  # of slow steps; the same on all ranks
        self._steps_to_check = 3  # the first step may compile; a safe point precedes it

    def on_ready(self, trainer: Trainer) -> None:
        """Raises `Stopped` on all ranks if the time left is too short to begin. All ranks must call."""
        self._loop = fit_loop_of(trainer)
        if self._loop.is_trial:
            return
        self._step_started_at = math.inf
        if self.checkpoint_callback:
            self.control_channel.on_stop = self.checkpoint_callback.write_held
        own = self.time_budget.is_over([StepKind.PLAIN]), math.isfinite(self.time_budget.end)
        is_over, self._has_limit = trainer.strategy.broadcast(own)
        if is_over:
            if trainer.is_global_zero:
                problem = "the time limit is too short for a single step"
                print_error(f"{problem}; set a longer --time_limit, or request more time")
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
        self.time_budget.steps[StepKind.VALIDATION if self._loop.epoch_loop.has_validated else kind].append(seconds)
        if not self._ends_epoch:
            self._step_seconds = seconds

    def _stop_in_time(self, trainer: Trainer) -> None:
        """Requests a stop if the next two steps and a save may not fit into the time left. All ranks must call."""
        time_budget = self.time_budget
        if checkpoints := self.checkpoint_callback:
            if self._steps == MEASURED_STEP:
                checkpoints.save(trainer)  # to measure how long a save takes
            time_budget.longest_save = max(time_budget.longest_save, checkpoints.last_seconds or 0.0)
        batches, plain_steps = sum(trainer.num_val_batches), time_budget.steps[StepKind.PLAIN]
        time_budget.validation_guess = batches * plain_steps[-1] if plain_steps and math.isfinite(batches) else 0.0
        if time_budget.is_over(next_steps(trainer)):
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
        newest = {kind: seconds[-1] for kind, seconds in self.time_budget.steps.items() if seconds}
        slow = {kind: seconds for kind, seconds in newest.items() if seconds >= SLOW_SECONDS}
        steps = min(MAX_CHECK_STEPS, max(1, int(CHECK_SECONDS / max(self._step_seconds, 1e-6))))
        own = slow, self._copy_seconds / COPY_SHARE, steps
        self._slow, self._seconds_between_copies, self._steps_to_check = trainer.strategy.broadcast(own)


class NoSignalConnector:
    """Replacement for the Trainer's signal connector (lightning 2.6): `process.stop_signals` handles all signals.

    Lightning's handler of SIGTERM calls a collective, so a signal to one of two ranks blocks both.
    """

    received_sigterm = False

    def register_signal_handlers(self) -> None:
        """Does nothing."""

    teardown = register_signal_handlers
