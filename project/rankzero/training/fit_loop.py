"""Lightning's training loops (2.6), with exact places to save at and to carry on from.

Lightning saves inside of its hooks, when a step or an epoch is half done: what was still to come of it (a validation,
the epoch's metrics, a step of the schedule) is left out by the run that carries on. Here a step and an epoch have an
end, behind everything that belongs to them; a checkpoint of that moment is carried on from as if nothing had happened.
"""

from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loops.fit_loop import RestartStage, _FitLoop, _set_sampler_epoch

from rankzero.sampling.batch_sampler import ElasticBatchSampler, Position
from rankzero.sampling.plan import SamplingPlan
from rankzero.training.epoch_loop import EpochLoop
from rankzero.training.hooks import HookBridge, LoopHooks, Subscribers
from rankzero.training.strategies import RunStrategy


def install(trainer: Trainer, plan: SamplingPlan) -> "HookBridge":
    """Puts the loops in the place of Lightning's; returns the callback that calls their hooks, for the first place."""
    stock = trainer.fit_loop
    ours = FitLoop(trainer, stock.min_epochs, stock.max_epochs)
    ours.epoch_loop = EpochLoop(trainer, stock.epoch_loop.min_steps, stock.epoch_loop.max_steps)
    ours.plan = ours.epoch_loop.plan = plan
    trainer.fit_loop = ours
    if isinstance(trainer.strategy, RunStrategy):
        trainer.strategy.before_idle_step = ours.epoch_loop.results.reduce
    ours.caller = HookBridge(ours.call)
    return ours.caller


def fit_loop_of(trainer: Trainer) -> "FitLoop":
    """The trainer's loop over epochs, which is ours."""
    assert isinstance(trainer.fit_loop, FitLoop)
    return trainer.fit_loop


class FitLoop(_FitLoop):
    """The loop over epochs."""

    plan: SamplingPlan
    epoch_loop: EpochLoop
    caller: HookBridge

    def __init__(self, trainer: Trainer, min_epochs: int | None, max_epochs: int | None) -> None:
        super().__init__(trainer, min_epochs, max_epochs)
        self.is_trial = False
        """Whether this is a trial of a finder (of a batch size or a learning rate), which is undone afterwards."""
        self.only_restores = False
        """Whether `fit` restores a checkpoint and trains nothing."""
        self.outside_trials: tuple[list[Callback], list[Logger]] = [], []
        """The run's callbacks and loggers, which a finder replaces during trials."""
        self.hooks: list[LoopHooks] = []
        """What is called beside callbacks, behind them."""

    def call(self, hook: str, *arguments: Any) -> None:
        """Calls one of our own hooks."""
        self.epoch_loop.subscribers.call(hook, *arguments)

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
        return self.position_of(self.plan.order) if self.plan.order else self.epochs_done

    def position_of(self, order: ElasticBatchSampler) -> Position:
        """How far an order has come, as a checkpoint of this moment has to say."""
        batches = self.epoch_loop.batches_done
        cut_short = order.epoch == self.epochs_done - 1 and not self.epoch_loop.is_complete
        if batches and (self.is_within_epoch or cut_short):
            return order.position(batches - order.pass_began_at)
        return Position(self.epochs_done)

    @property
    def skip(self) -> bool:
        return super().skip or self.only_restores

    def run(self) -> None:
        # Lightning's finders (2.6) exchange the callbacks and run the loop, within a hook of the run that they serve.
        outer = self.is_trial, vars(self.epoch_loop).get("subscribers")
        self.is_trial = self.caller not in self.trainer.callbacks  # type: ignore[attr-defined]
        try:
            super().run()
        finally:
            self.is_trial, subscribers = outer
            if subscribers is not None:
                self.epoch_loop.subscribers = subscribers

    def setup_data(self) -> None:
        before = self._combined_loader
        self.plan.loads_training = True
        try:
            super().setup_data()
        finally:
            self.plan.loads_training = False
        if self._combined_loader not in (None, before) and not self.plan.start:
            for loader in self._combined_loader.flattened:  # a finder has them made anew in an epoch's first hook
                _set_sampler_epoch(loader, self.epochs_done)

    def reset(self) -> None:
        """Turns the counts of epochs to where a checkpoint left off, wherever in Lightning's hooks it was saved."""
        order = self.plan.order
        if self.is_trial or not (self.is_resuming and order):
            super().reset()
            return
        torch.set_grad_enabled(True)
        done = order.start_position.epoch
        begun = done + (order.start_position.step > 0)
        for counts in (self.epoch_progress.current, self.epoch_progress.total):
            vars(counts).update(ready=begun, started=begun, processed=done, completed=done)
        self._restart_stage = RestartStage.RESTARTED_MID_EPOCH if begun > done else RestartStage.NONE

    def on_run_start(self) -> None:
        super().on_run_start()
        hooks = [hook for hook in self.hooks if hook.in_trials or not self.is_trial]
        self.epoch_loop.subscribers = Subscribers(self.trainer, hooks)
        self.call("on_ready")
        self.epoch_loop.subscribers.drop_idle()
        self.epoch_loop.come_to_safe_point()

    def on_advance_start(self) -> None:
        super().on_advance_start()
        # Lightning leaves schedules that watch a metric out of the epoch that it carries on, for want of the metric.
        self._restarting = False

    def on_advance_end(self) -> None:
        complete = self.epoch_loop.is_complete
        super().on_advance_end()
        if not self.is_trial:
            self.plan.start = []  # loaders that are asked for anew begin at the beginning
        if not complete:
            return
        order = self.plan.order
        if order and order.is_patched:  # the epochs to come have another length
            assert self._combined_loader is not None
            self._combined_loader.reset()
            self._combined_loader = None
        self.call("on_epoch_done")
        self.epoch_loop.come_to_safe_point()
