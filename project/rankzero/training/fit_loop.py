"""Lightning's training loops (2.6), with exact positions to save at and to resume from.

Lightning saves inside its hooks, in the middle of a step or an epoch. A resumed run then omits the rest of that step or
epoch: a validation, the epoch's metrics, a step of the schedule. Here, a step and an epoch end after everything that
belongs to them. A run that resumes from a checkpoint of that moment continues as if it had never stopped.
"""

from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loops.fit_loop import RestartStage

from rankzero.distributed.monitoring.activity import HOOK, Activity
from rankzero.sampling.batch_sampler import ElasticBatchSampler, Position
from rankzero.sampling.plan import SamplingPlan
from rankzero.training import lightning_inside as stock
from rankzero.training.epoch_loop import EpochLoop
from rankzero.training.hooks import HookBridge, LoopHooks, Subscribers


def install(trainer: Trainer, plan: SamplingPlan, activity: Activity | None = None) -> "HookBridge":
    """Replaces Lightning's loops; returns a callback that calls the new loops' hooks and must be the first one."""
    replaced, activity = trainer.fit_loop, activity or Activity()
    loop = FitLoop(trainer, replaced.min_epochs, replaced.max_epochs)
    loop.epoch_loop = EpochLoop(trainer, replaced.epoch_loop.min_steps, replaced.epoch_loop.max_steps)
    loop.plan = loop.epoch_loop.plan = plan
    loop.epoch_loop.activity = activity
    trainer.fit_loop = loop
    loop.hook_bridge = HookBridge(loop.call, activity, loop.epoch_loop.record)
    return loop.hook_bridge


def fit_loop_of(trainer: Trainer) -> "FitLoop":
    """Returns the Trainer's loop over epochs, which `install` has replaced."""
    assert isinstance(trainer.fit_loop, FitLoop)
    return trainer.fit_loop


class FitLoop(stock.FitLoop):
    """Loop over epochs."""

    plan: SamplingPlan
    epoch_loop: EpochLoop
    hook_bridge: HookBridge

    def __init__(self, trainer: Trainer, min_epochs: int | None, max_epochs: int | None) -> None:
        super().__init__(trainer, min_epochs, max_epochs)
        self.is_trial = False
        """True during a trial of a batch size or learning rate finder, which is undone afterwards."""
        self.only_restores = False
        """True if `fit` only restores a checkpoint, without training."""
        self.run_callbacks_and_loggers: tuple[list[Callback], list[Logger]] = [], []
        """The run's callbacks and loggers; a finder replaces both during its trials."""
        self.extra_subscribers: list[LoopHooks] = []
        """Subscribers that are not callbacks; called after the callbacks."""

    def call(self, hook: str, *arguments: Any) -> None:
        """Calls one hook of `LoopHooks` for all subscribers."""
        self.epoch_loop.subscribers.call(hook, *arguments)

    @property
    def computed_metrics(self) -> dict[str, Any]:
        """The Trainer's metrics, as far as they are computed."""
        return stock.shown_metrics(self.trainer)["callback"]

    @property
    def epochs_done(self) -> int:
        """Number of epochs that have ended; an epoch has ended before its `on_train_epoch_end` hooks run."""
        return int(self.epoch_progress.current.processed)  # type: ignore[attr-defined]

    @property
    def is_within_epoch(self) -> bool:
        """True if an epoch has begun and has not ended."""
        return bool(self.epoch_progress.current.started > self.epochs_done)  # type: ignore[attr-defined]

    @property
    def can_stop_early(self) -> bool:
        """True once `min_epochs` and `min_steps` are reached."""
        return self.epochs_done >= (self.min_epochs or 0) and self.epoch_loop.global_step >= (self.min_steps or 0)

    @property
    def has_reached_limits(self) -> bool:
        """True if `max_steps` or `max_epochs` is reached."""
        counts = (self.epoch_loop.global_step, self.max_steps), (self.epochs_done, self.max_epochs)
        return any(limit not in (None, -1) and count >= limit for count, limit in counts)

    @property
    def position(self) -> Position | int:
        """The run's position in its order of samples; only the number of ended epochs if the order is the user's."""
        return self.position_of(self.plan.order) if self.plan.order else self.epochs_done

    def position_of(self, order: ElasticBatchSampler) -> Position:
        """Returns the position in an order of samples, as a checkpoint saved now must record it."""
        batches = self.epoch_loop.batches_done
        cut_short = order.epoch == self.epochs_done - 1 and not self.epoch_loop.is_complete
        if batches and (self.is_within_epoch or cut_short):
            return order.position(batches - order.batches_of_earlier_passes, self.epoch_loop.has_taken_last_step)
        return Position(self.epochs_done)

    @property
    def stored_order(self) -> dict[str, Any] | None:
        """The order of samples and the position in it, as a checkpoint stores it; None if the order is the user's.

        It does not depend on the rank. `rankzero.sampling.plan` reads it.
        """
        orders = self.plan.training_orders
        if not orders:
            return None
        return {
            "positions": [vars(self.position_of(order)) for order in orders],
            "seed": self.plan.seed,
            "global_batch_sizes": [order.global_batch_size for order in orders],
            "data": self.plan.data,
        }

    @property
    def skip(self) -> bool:
        """Whether nothing is to be trained; also sets the epoch counters to those of the checkpoint.

        Lightning reads this property before the loop, so no later place could set the counters in time.
        """
        if (order := self._resumed_order) is not None and not self.only_restores:
            completed = order.start_position.epoch  # whichever of Lightning's hooks saved the checkpoint
            started = completed + (order.start_position.step > 0)
            for counts in (self.epoch_progress.current, self.epoch_progress.total):
                vars(counts).update(ready=started, started=started, processed=completed, completed=completed)
            self._restart_stage = RestartStage.RESTARTED_MID_EPOCH if started > completed else RestartStage.NONE
        return super().skip or self.only_restores

    def run(self) -> None:
        # Lightning's finders (2.6) replace the callbacks and run this loop, within a hook of the actual run.
        outer = self.is_trial, vars(self.epoch_loop).get("subscribers")
        self.is_trial = self.hook_bridge not in self.trainer.callbacks  # type: ignore[attr-defined]
        try:
            super().run()
            if self.only_restores:
                self._end_restart(self)
        finally:
            self.is_trial, subscribers = outer
            if subscribers is not None:
                self.epoch_loop.subscribers = subscribers

    def _end_restart(self, loop: Any) -> None:
        """Marks a loop and its inner loops as not restarting, as they are after training."""
        loop.on_iteration_done()
        for inner in vars(loop).values():
            if hasattr(inner, "on_iteration_done"):
                self._end_restart(inner)

    def setup_data(self) -> None:
        previous_loader, counts = self._combined_loader, vars(self.epoch_progress.current)
        epoch, interval = counts["completed"], self.trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
        if self.is_resuming and interval and self.epoch_loop.loaders_epoch is not None:
            # Lightning (2.6, #21492) would reload in this epoch, and count the epochs until the next time from here.
            counts["completed"] -= (epoch - self.epoch_loop.loaders_epoch) % interval
        self.plan.loads_training = True
        try:
            super().setup_data()
            if self._combined_loader is not previous_loader:
                self.epoch_loop.loaders_epoch = counts["completed"]
        finally:
            self.plan.loads_training, counts["completed"] = False, epoch
        if self._combined_loader not in (None, previous_loader) and not self.plan.start_positions:
            for loader in self._combined_loader.flattened:  # a finder in an epoch's first hook recreates the loaders
                inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
                for sampler in (getattr(loader, "sampler", None), inner):
                    if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                        set_epoch(self.epochs_done)

    @property
    def _resumed_order(self) -> ElasticBatchSampler | None:
        """The order of samples whose position a checkpoint has set; None if this loop does not resume from one."""
        return self.plan.order if self.is_resuming and not self.is_trial else None

    def reset(self) -> None:
        if self._resumed_order is not None:
            torch.set_grad_enabled(True)
            return
        super().reset()
        if not self.is_resuming and not self.is_trial:  # an error may have ended the previous `fit` in mid-epoch
            for counts in map(vars, (self.epoch_progress.current, self.epoch_progress.total)):
                counts.update(ready=counts["processed"], started=counts["processed"])

    def on_run_start(self) -> None:
        self.epoch_loop.activity.step = self.epoch_loop.global_step
        self.epoch_loop.activity.enter(HOOK)
        super().on_run_start()
        self.epoch_loop.subscribers = Subscribers(self.trainer, self.extra_subscribers)
        self.call("on_ready")
        self.epoch_loop.subscribers.drop_unneeded()
        self.epoch_loop.share_stop()
        self.epoch_loop.reach_safe_point()

    def on_advance_start(self) -> None:
        super().on_advance_start()
        # While `restarting`, Lightning does not step schedules that watch a metric at the end of the epoch, since its
        # checkpoints lack the metric. Rankzero's checkpoints contain it.
        self._restarting = False

    def on_advance_end(self) -> None:
        is_complete = self.epoch_loop.is_complete
        self.epoch_loop.activity.enter(HOOK)
        super().on_advance_end()
        self.epoch_loop.share_stop()
        if not self.is_trial:
            # Further loaders start at the beginning.
            self.plan.start_positions, self.plan.kept_draws, self.plan.kept_streams = [], [], []
        if not is_complete:
            return
        order = self.plan.order
        if order and order.has_changed_batch_size:  # later epochs have a different number of steps
            assert self._combined_loader is not None
            self._combined_loader.reset()
            self._combined_loader = None
        self.call("on_epoch_done")
        self.epoch_loop.reach_safe_point()
