"""Copies the state in memory while steps are slow, so that a stop request can save before a step ends."""

import math
import time

from lightning.pytorch import Trainer

from rankzero.distributed.devices import synchronize
from rankzero.distributed.stop_and_failure.channel import ControlChannel
from rankzero.training.callbacks.checkpointing import CheckpointCallback
from rankzero.training.callbacks.time_limit import StepKind, next_steps
from rankzero.training.fit_loop import fit_loop_of
from rankzero.training.hooks import LoopHooks

SLOW_SECONDS = 2.0
"""A step that takes at least this long is slow. PBS by default kills a job 10 seconds after SIGTERM."""

COPY_SHARE = 0.02
"""Greatest share of the time of slow steps that the copies may take."""

CHECK_SECONDS = 10.0
"""Approximate time between two agreements on which steps are slow; each is a broadcast from rank zero."""

MAX_CHECK_STEPS = 256
"""Greatest number of steps between two agreements. The ranks also agree after each epoch."""


class HeldCheckpoint(LoopHooks):
    """Holds a checkpoint in memory before each slow step, and writes it when a stop is requested.

    A run stops and saves after a step. If the step, including the validation after it, takes longer than the time
    between SIGTERM and SIGKILL, the run is killed before it can save. Without slow steps nothing is copied. All ranks
    must have this subscriber, after the callback that stops the run.
    """

    def __init__(self, control_channel: ControlChannel, checkpoint_callback: CheckpointCallback) -> None:
        self.control_channel, self.checkpoint_callback = control_channel, checkpoint_callback
        self._started_at = self._step_seconds = math.inf
        self._measured: dict[StepKind, float] = {}
        self._slow: dict[StepKind, float] = {}
        self._epoch_kind: StepKind | None = None
        self._copy_seconds = 0.0
        self._seconds_between_copies = self._seconds_since_copy = 0.0  # of slow steps; the same on all ranks
        self._steps_to_check = 3  # the first step may compile; a safe point precedes it

    def on_ready(self, trainer: Trainer) -> None:
        self._started_at = math.inf
        self.control_channel.on_stop = self.checkpoint_callback.write_held

    def on_epoch_done(self, trainer: Trainer) -> None:
        has_validated = fit_loop_of(trainer).epoch_loop.has_validated
        self._epoch_kind = StepKind.VALIDATION if has_validated else StepKind.EPOCH

    def on_safe_point(self, trainer: Trainer) -> None:
        """Holds a checkpoint if the next step is slow. All ranks must call."""
        now = time.monotonic()
        seconds, self._started_at = now - self._started_at, now
        if seconds >= SLOW_SECONDS or self._measured:
            has_validated = fit_loop_of(trainer).epoch_loop.has_validated
            kind = StepKind.VALIDATION if has_validated else StepKind.PLAIN
            self._measured[self._epoch_kind or kind] = seconds
        if self._epoch_kind is None:
            self._step_seconds = seconds
        self._steps_to_check -= 1
        if self._steps_to_check <= 0 or self._epoch_kind:
            self._agree(trainer)
        if self._slow and not fit_loop_of(trainer).done:
            # Every kind of step includes a plain step.
            step_seconds = self._slow.get(next_steps(trainer)[0]) or self._slow.get(StepKind.PLAIN, 0.0)
            self._seconds_since_copy += step_seconds
            if step_seconds and self._seconds_since_copy >= self._seconds_between_copies:
                device = trainer.strategy.root_device
                synchronize(device)  # ends the steps before; below, it ends the copy
                began = time.monotonic()
                self.checkpoint_callback.hold(trainer)
                synchronize(device)
                self._seconds_since_copy, self._steps_to_check = 0.0, 1
                self._started_at = time.monotonic()
                self._copy_seconds = self._started_at - began

    def _agree(self, trainer: Trainer) -> None:
        """Broadcasts which kinds of steps are slow on rank zero, and after how many steps to do so again."""
        self._epoch_kind = None
        slow = {kind: seconds for kind, seconds in self._measured.items() if seconds >= SLOW_SECONDS}
        steps = min(MAX_CHECK_STEPS, max(1, int(CHECK_SECONDS / max(self._step_seconds, 1e-6))))
        own = slow, self._copy_seconds, steps
        self._slow, copy_seconds, self._steps_to_check = trainer.strategy.broadcast(own)
        self._seconds_between_copies = copy_seconds / COPY_SHARE
