"""Durations of steps and saves, and whether the next steps fit into the time left."""

import time
from collections import deque
from collections.abc import Sequence
from enum import IntEnum

from lightning.pytorch import Trainer

from rankzero.training.fit_loop import fit_loop_of
from rankzero.training.validations import ValidationSchedule

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
        steps: Kind -> seconds of the newest steps, each with everything that belongs to its kind, but without a save.
        validation_guess: Estimate for a validation before one has been measured, in seconds.
    """

    def __init__(self, end: float) -> None:
        self.end = end
        self.validation_guess = 0.0
        self.steps: dict[StepKind, deque[float]] = {kind: deque(maxlen=REMEMBERED_STEPS) for kind in StepKind}
        self._longest_save = 0.0

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
