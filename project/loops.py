"""Lightning's training loops (2.6), with exact places to save at and to carry on from.

Lightning saves inside of its hooks, when a step or an epoch is half done: what was still to come of it (a validation,
the epoch's metrics, a step of the schedule) is left out by the run that carries on. Here a step and an epoch have an
end, behind everything that belongs to them; a checkpoint of that moment is carried on from as if nothing had happened.
"""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.loops.fit_loop import RestartStage, _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

from project.logged_metrics import Results
from project.sampling.sharding import Sharding
from project.sampling.training_batches import Position, TrainingBatches


class LoopHooks:
    """What is called when nothing is half done. All ranks are called at the same time."""

    def on_ready(self, trainer: Trainer) -> None:
        """All that has to do with the start is done; the first batch comes next."""

    def on_step_done(self, trainer: Trainer) -> None:
        """An optimiser step is done, and the validation that was due behind it."""

    def on_epoch_done(self, trainer: Trainer) -> None:
        """An epoch is done, its hooks and its metrics included."""

    def on_safe_point(self, trainer: Trainer) -> None:
        """Here a run can be saved and can stop. Behind each of the above, but for a step that ends an epoch."""


class LoopCallback(LoopHooks, Callback):
    """A callback that is called at Lightning's places too."""


def install(trainer: Trainer, sharding: Sharding) -> None:
    """Puts the loops in the place of Lightning's."""
    theirs = trainer.fit_loop
    ours = FitLoop(trainer, theirs.min_epochs, theirs.max_epochs)
    ours.epoch_loop = EpochLoop(trainer, theirs.epoch_loop.min_steps, theirs.epoch_loop.max_steps)
    ours.sharding = ours.epoch_loop.sharding = sharding
    trainer.fit_loop = ours


def fit_loop_of(trainer: Trainer) -> "FitLoop":
    """The trainer's loop over epochs, which is ours."""
    assert isinstance(trainer.fit_loop, FitLoop)
    return trainer.fit_loop


class FitLoop(_FitLoop):
    """The loop over epochs."""

    sharding: Sharding
    epoch_loop: "EpochLoop"

    def __init__(self, trainer: Trainer, min_epochs: int | None, max_epochs: int | None) -> None:
        super().__init__(trainer, min_epochs, max_epochs)
        self.hooks: list[LoopHooks] = []
        """What is called beside callbacks, behind them: Lightning would pay for each in every step."""
        self._listening: dict[str, list[Callable[[Trainer], None]]] = {}

    def call(self, hook: str) -> None:
        """Calls one of our own hooks."""
        for listen in self._listening[hook]:
            listen(self.trainer)

    def come_to_safe_point(self) -> None:
        """Where a run can be saved and can stop."""
        self.call("on_safe_point")
        self.epoch_loop.has_validated = False

    def _find_who_listens(self) -> None:
        callbacks = [callback for callback in self.trainer.callbacks if isinstance(callback, LoopHooks)]  # type: ignore[attr-defined]
        for hook in ("on_ready", "on_step_done", "on_epoch_done", "on_safe_point"):
            default = getattr(LoopHooks, hook)
            listening = [one for one in [*callbacks, *self.hooks] if getattr(type(one), hook) is not default]
            self._listening[hook] = [getattr(one, hook) for one in listening]

    @property
    def epochs_done(self) -> int:
        """Epochs that have ended; one whose last hooks are running counts as ended."""
        return int(self.epoch_progress.current.processed)  # type: ignore[attr-defined]

    @property
    def is_within_epoch(self) -> bool:
        """Whether an epoch has begun and not ended."""
        return bool(self.epoch_progress.current.started > self.epochs_done)  # type: ignore[attr-defined]

    @property
    def place(self) -> Position | int:
        """How far the run has come within its epochs."""
        return self.position_of(self.sharding.order) if self.sharding.order else self.epochs_done

    def position_of(self, order: TrainingBatches) -> Position:
        """How far an order has come, as a checkpoint of this moment has to say."""
        batches = self.epoch_loop.batches_done
        cut_short = order.epoch == self.epochs_done - 1 and not self.epoch_loop.is_complete
        if batches and (self.is_within_epoch or cut_short):
            return order.position(batches - order.cycle_began_at)
        return Position(self.epochs_done)

    def reset(self) -> None:
        """Turns the counts of epochs to where a checkpoint left off, wherever in Lightning's hooks it was saved."""
        order = self.sharding.order
        if not (self.is_resuming and order):
            super().reset()
            return
        torch.set_grad_enabled(True)
        done = order.origin.epoch
        begun = done + (order.origin.step > 0)
        for counts in (self.epoch_progress.current, self.epoch_progress.total):
            vars(counts).update(ready=begun, started=begun, processed=done, completed=done)
        self._restart_stage = RestartStage.RESTARTED_MID_EPOCH if begun > done else RestartStage.NONE

    def on_run_start(self) -> None:
        super().on_run_start()
        self._find_who_listens()
        self.call("on_ready")
        self.come_to_safe_point()

    def on_advance_start(self) -> None:
        super().on_advance_start()
        # Lightning leaves schedules that watch a metric out of the epoch that it carries on, for want of the metric.
        self._restarting = False

    def on_advance_end(self) -> None:
        complete = self.epoch_loop.is_complete
        super().on_advance_end()
        self.sharding.start = []  # loaders that are asked for anew begin at the beginning
        if not complete:
            return
        order = self.sharding.order
        if order and order.is_patched:  # the epochs to come have another length
            assert self._combined_loader is not None
            self._combined_loader.reset()
            self._combined_loader = None
        self.call("on_epoch_done")
        self.come_to_safe_point()


class EpochLoop(_TrainingEpochLoop):
    """The loop over the batches of an epoch."""

    sharding: Sharding

    def __init__(self, trainer: Trainer, min_steps: int | None, max_steps: int) -> None:
        super().__init__(trainer, min_steps, max_steps)
        self._results = self.results = Results()
        self.at_rest = False
        """Whether no batch is half done, nor what belongs to it."""
        self.has_validated = False
        """Whether there was a validation since the last safe point."""

    @property
    def batches_done(self) -> int:
        """Batches of this epoch that have been trained on."""
        return int(self.batch_progress.current.processed)  # type: ignore[attr-defined]

    @property
    def is_complete(self) -> bool:
        """Whether the epoch's last batch is done."""
        return self._num_ready_batches_reached()

    def reset(self) -> None:
        """Turns to where a checkpoint left off, or to the beginning of an epoch."""
        within, order = self.trainer.fit_loop.restarted_mid_epoch, self.sharding.order
        if not self.is_resuming or (within and not order):
            super().reset()  # an epoch from its beginning; or an order that is not ours, as Lightning carries it on
            return
        self.restarting = False  # nothing is left to be made up for
        if not within:
            super().reset()
            return
        assert order
        self.scheduler_progress.reset_on_restart()
        self.automatic_optimization.optim_progress.reset_on_restart()
        if not self.at_rest and self.batches_done <= order.first_batch:
            self._batches_that_stepped += 1  # Lightning counts a step behind the hooks in which it saves
        done = order.first_batch
        vars(self.batch_progress.current).update(ready=done, started=done, processed=done, completed=done)
        self.batch_progress.is_last_batch = done >= self.trainer.num_training_batches

    def advance(self, data_fetcher: _DataFetcher) -> None:
        self.at_rest = False
        super().advance(data_fetcher)

    def on_advance_end(self, data_fetcher: _DataFetcher) -> None:
        super().on_advance_end(data_fetcher)
        self.at_rest = True
        if self._should_accumulate():
            return
        loop = fit_loop_of(self.trainer)
        loop.call("on_step_done")
        if not self.is_complete:  # otherwise the epoch's end follows at once
            loop.come_to_safe_point()

    def _should_check_val_fx(self, data_fetcher: _DataFetcher) -> bool:
        validates = bool(super()._should_check_val_fx(data_fetcher))
        self.has_validated |= validates
        return validates

    def _broadcast_sigterm_tensor(self) -> None:
        """Lightning (2.5.2 on) has the ranks agree by a collective, and wait for the device, in every step."""

    def on_save_checkpoint(self) -> dict[str, Any]:
        return {**super().on_save_checkpoint(), "at_rest": self.at_rest}

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        super().on_load_checkpoint(state_dict)
        self.at_rest = bool(state_dict.get("at_rest"))
