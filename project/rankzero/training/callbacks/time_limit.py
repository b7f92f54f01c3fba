"""Stops a run at the last safe point before its time limit, as far as step durations can be predicted."""

import math
import time
from collections import deque
from collections.abc import Sequence
from enum import IntEnum

from lightning.pytorch import Trainer

from rankzero.distributed.stop_and_failure.channel import ControlChannel
from rankzero.messages import TIME_LIMIT_REACHED, Stopped, print_error
from rankzero.training.callbacks.checkpointing import CheckpointCallback
from rankzero.training.fit_loop import fit_loop_of
from rankzero.training.hooks import LoopHooks
from rankzero.training.validations import ValidationSchedule

MEASURED_STEP = 10
"""Step after which a run with a time limit saves in order to measure a save, whatever `--save_every` specifies."""

REMEMBERED_STEPS = 32
"""Number of recent steps of each kind to remember. The slowest is the estimate, until it is no longer among them."""

UNMEASURED_SAVE_SECONDS = 5.0
"""Estimate for a save before one has been measured."""

MARGIN_SECONDS = 10.0
"""Seconds that must remain."""


class StepKind(IntEnum):
    """What a step includes in addition to its batches: nothing, the end of an epoch, or a validation."""

    PLAIN = 0
    EPOCH = 1
    VALIDATION = 2  # and perhaps the end of an epoch


class WallTime:
    """Decides from measured durations whether the next steps and a save fit into the time left.

    Attributes:
        validation_guess: Estimate for a validation before one has been measured, in seconds.
    """

    def __init__(self, end: float) -> None:
        self.end = end
        self.validation_guess = 0.0
        self._steps: dict[StepKind, deque[float]] = {kind: deque(maxlen=REMEMBERED_STEPS) for kind in StepKind}
        self._longest_save = 0.0

    def note_step(self, seconds: float, kind: StepKind) -> None:
        """Records the seconds of a step, including everything that belongs to its kind, but no save."""
        self._steps[kind].append(seconds)

    def note_save(self, seconds: float) -> None:
        """Records the seconds of a save."""
        self._longest_save = max(seconds, self._longest_save)

    @property
    def seconds_for_steps(self) -> float:
        """Seconds until a save must begin. Twice the longest is reserved, since file systems are slow at times."""
        return self.end - time.monotonic() - (2 * self._longest_save or UNMEASURED_SAVE_SECONDS) - MARGIN_SECONDS

    def is_over(self, next_steps: Sequence[StepKind]) -> bool:
        """Whether the next steps and a save after them may take longer than the time left."""
        return self.seconds_for_steps < sum(map(self._step, next_steps))

    def _step(self, kind: StepKind) -> float:
        """Returns the estimated seconds of a step."""
        if self._steps[kind]:
            return max(self._steps[kind])
        if kind is StepKind.VALIDATION:
            return self._step(StepKind.EPOCH) + self.validation_guess
        return self._step(StepKind.PLAIN) if kind is StepKind.EPOCH else 0.0


class TimeLimit(LoopHooks):
    """Measures steps, validations and saves, and stops all ranks before the time limit.

    All ranks must have it, after the checkpoint callback.
    """

    def __init__(
        self, control_channel: ControlChannel, end: float, checkpoint_callback: CheckpointCallback | None
    ) -> None:
        self.control_channel, self.checkpoint_callback = control_channel, checkpoint_callback
        self.wall_time = WallTime(end)
        self._step_started_at = time.monotonic()
        self._plain_seconds = 0.0
        self._steps, self._has_limit = 0, False

    def needs(self, hook: str) -> bool:
        return hook == "on_ready" or self._has_limit

    def on_ready(self, trainer: Trainer) -> None:
        """Stops the run if the time left is too short to begin. All ranks must call.

        Raises:
            Stopped: The time is too short; raised on all ranks.
        """
        is_over, self._has_limit = trainer.strategy.broadcast(
            (self.wall_time.is_over([StepKind.PLAIN]), math.isfinite(self.wall_time.end))
        )
        if is_over:
            if trainer.is_global_zero:
                print_error(
                    "the time limit is too short for a single step; set a longer --time_limit, or request more time"
                )
            raise Stopped(TIME_LIMIT_REACHED)

    def on_step_done(self, trainer: Trainer) -> None:
        self._steps += 1
        # The last step of an epoch is measured together with the end of the epoch.
        if not fit_loop_of(trainer).epoch_loop.is_complete:
            self._record(trainer, StepKind.PLAIN)

    def on_epoch_done(self, trainer: Trainer) -> None:
        self._record(trainer, StepKind.EPOCH)

    def on_safe_point(self, trainer: Trainer) -> None:
        """Requests a stop if the next two steps and a save may not fit into the time left. All ranks must call."""
        if self.checkpoint_callback and self._steps == MEASURED_STEP:
            self.checkpoint_callback.save(trainer)  # to measure how long a save takes
        self._step_started_at = time.monotonic()
        if self.checkpoint_callback and self.checkpoint_callback.last_seconds:
            self.wall_time.note_save(self.checkpoint_callback.last_seconds)
        batches = sum(trainer.num_val_batches)
        self.wall_time.validation_guess = batches * self._plain_seconds if math.isfinite(batches) else 0.0
        if self.wall_time.is_over(next_steps(trainer)):
            self.control_channel.request_stop(TIME_LIMIT_REACHED)

    def _record(self, trainer: Trainer, kind: StepKind) -> None:
        kind = StepKind.VALIDATION if fit_loop_of(trainer).epoch_loop.has_validated else kind
        seconds = time.monotonic() - self._step_started_at
        self.wall_time.note_step(seconds, kind)
        if kind is StepKind.PLAIN:
            self._plain_seconds = seconds


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
