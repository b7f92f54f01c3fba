"""A run stops at the last safe step before its time is up, as long as that can be foreseen."""

import math
import time

from lightning.pytorch import Trainer

from project.checkpoints.saving import SaveCheckpoints
from project.errors import TIME_IS_UP, Stopped
from project.lifeline import Lifeline
from project.loops import LoopCallback, fit_loop_of
from project.wall_time import WallTime

MEASURED_AT = 10
"""The safe point at which a run whose time is limited saves for the first time, whatever `--save_every` says."""


class MindTheTime(LoopCallback):
    """Measures steps, validations and saves, and has all ranks stop in time. All ranks must have it, behind what saves.

    Args:
        lifeline: Through which all are asked to stop.
        wall_time: What is left; rank zero's counts.
        saving: What saves; None where checkpoints are not wanted.
    """

    def __init__(self, lifeline: Lifeline, wall_time: WallTime, saving: SaveCheckpoints | None) -> None:
        self.lifeline, self.wall_time, self.saving = lifeline, wall_time, saving
        self._since = time.monotonic()
        self._plain_seconds = 0.0
        self._safe_points, self._limited = 0, False

    def on_ready(self, trainer: Trainer) -> None:
        """All ranks must call.

        Raises:
            Stopped: On all ranks, where there is no time to begin.
        """
        is_over, self._limited = trainer.strategy.broadcast(
            (self.wall_time.is_over([False]), math.isfinite(self.wall_time.end))
        )
        if is_over:
            raise Stopped(TIME_IS_UP)

    def on_step_done(self, trainer: Trainer) -> None:
        loop = fit_loop_of(trainer).epoch_loop
        if not loop.is_complete:  # otherwise the end of the epoch belongs to it
            self._note(loop.is_long(loop.batches_done))

    def on_epoch_done(self, trainer: Trainer) -> None:
        self._note(long=True)

    def on_safe_point(self, trainer: Trainer) -> None:
        """All ranks must call."""
        if not self._limited:
            return
        self._safe_points += 1
        if self.saving and self._safe_points == MEASURED_AT:
            self.saving.save(trainer)  # so that it is known how long that takes
        self._since = time.monotonic()
        if self.saving and self.saving.last_seconds:
            self.wall_time.note_save(self.saving.last_seconds)
        batches = sum(trainer.num_val_batches)
        self.wall_time.validation_guess = batches * self._plain_seconds if math.isfinite(batches) else 0.0
        if self.wall_time.is_over(self._next_steps(trainer)):
            self.lifeline.ask_to_stop(TIME_IS_UP)

    def _note(self, long: bool) -> None:
        seconds = time.monotonic() - self._since
        self.wall_time.note_step(seconds, long)
        if not long:
            self._plain_seconds = seconds

    @staticmethod
    def _next_steps(trainer: Trainer) -> list[bool]:
        """Which of the next two steps are long; the second is the one that all can agree to stop behind."""
        loop = fit_loop_of(trainer).epoch_loop
        done = 0 if loop.is_complete else loop.batches_done
        return [loop.is_long(done + number * trainer.accumulate_grad_batches) for number in (1, 2)]
