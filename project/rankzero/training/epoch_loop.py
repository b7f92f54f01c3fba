"""Lightning's loop over the batches of an epoch, with a defined end of each step.

A step ends after its validation, its logging and its schedules. At that point a run can be saved and can stop.
`loop.py` trains on the batches. What it does not support is trained by Lightning's own loop, and the reason is printed.
"""

from contextlib import AbstractContextManager
from math import inf
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import WarningCache

from rankzero.distributed.monitoring.activity import Activity
from rankzero.messages import print_notice
from rankzero.sampling.plan import SamplingPlan
from rankzero.training import lightning_inside as stock
from rankzero.training.hooks import Subscribers
from rankzero.training.lightning_inside import fallback_reason
from rankzero.training.loop import TrainingLoop
from rankzero.training.metrics.epoch_averages import Results
from rankzero.training.metrics.step_log import IntervalRecord
from rankzero.training.speed.compiled_step import CompiledStep
from rankzero.training.strategies import RunStrategy
from rankzero.training.validations import ValidationSchedule


class EpochLoop(stock.EpochLoop):
    """Loop over the batches of an epoch."""

    plan: SamplingPlan
    subscribers: Subscribers

    def __init__(self, trainer: Trainer, min_steps: int | None, max_steps: int) -> None:
        super().__init__(trainer, min_steps, max_steps)
        self._results = self.results = Results(trainer)
        self.activity = Activity()
        """What the main thread is doing."""
        self.record = IntervalRecord(trainer)
        """What this rank records in the steps of a logging interval."""
        self.agreements: Any = None
        """The `RankAgreements` of a fit on several ranks; else None."""
        self.around_next_batch: AbstractContextManager[Any] | None = None
        """Context in which the next batch is trained on."""
        self.has_validated = False
        """True if a validation has run since the last safe point."""
        self.loaders_epoch: int | None = None
        """Epoch in which the training loaders were created."""
        self.compiled_step: CompiledStep | None = None
        """What compiles the steps of this fit; None if they are not to be compiled."""
        self._training_loop: TrainingLoop | None = None
        self._fetcher: Any = None
        self._skipped_batches = 0
        self._counted_batches: int | None = None
        """Batches of this epoch whose steps Lightning has counted; None before the loop runs."""
        self._resumes_with_uncounted_step: bool | None = None
        self._next_validation = inf
        """Number of batches of this epoch after which a validation may be due; infinity for none in this epoch."""
        self._metrics_are_current = True
        self._reported: set[str] = set()
        self.warning_cache = WarningCache()

    @property
    def global_step(self) -> int:
        if self._training_loop is None:
            return super().global_step
        # The same value as Lightning's, without its nested calls: this property is read several times per step.
        return self.automatic_optimization.optim_progress.optimizer.step.total.completed

    @property
    def steps_done(self) -> int:
        """Number of steps in all epochs, as loggers receive it; counts once a step in which several optimizers step."""
        return self._batches_that_stepped

    @property
    def batches_done(self) -> int:
        """Number of batches of this epoch that are done, including one that `on_train_batch_start` skipped."""
        return int(self.batch_progress.current.processed)  # type: ignore[attr-defined]

    @property
    def batches_trained(self) -> int:
        """Number of batches of this epoch that were trained on, without one that `on_train_batch_start` skipped."""
        return self.batches_done - self._skipped_batches

    @property
    def batches_in_steps(self) -> int:
        """Number of batches of this epoch whose gradients an optimizer step has used."""
        batches = self.batches_trained
        return batches if self.has_taken_last_step else batches - batches % self.trainer.accumulate_grad_batches

    @property
    def has_taken_last_step(self) -> bool:
        """True after the last optimizer step of the epoch, which may have fewer batches than the others."""
        counts: Any = self.batch_progress.current
        return self.is_complete and counts.processed == counts.ready and not self._skipped_batches

    @property
    def is_within_step(self) -> bool:
        """True if batches of a step are done, or one is being trained on, and the step is not taken yet."""
        counts: Any = self.batch_progress.current
        return bool(counts.ready > counts.processed or self.batches_trained > self.batches_in_steps)

    @property
    def is_complete(self) -> bool:
        """True from the last batch of the epoch on."""
        progress = self.batch_progress
        return progress.is_last_batch or progress.current.ready == self.trainer.num_training_batches

    def should_accumulate(self) -> bool:
        """Returns whether no optimizer step follows the current batch."""
        is_within_step = self.batch_progress.current.ready % self.trainer.accumulate_grad_batches
        return bool(is_within_step) and not self.is_complete

    def reset(self) -> None:
        """Sets the counters to the position of the checkpoint, or to the beginning of an epoch."""
        mid_epoch, order = self.trainer.fit_loop.restarted_mid_epoch, self.plan.order
        # Lightning counts an epoch that `max_steps` cut short as done, but resumes with the epoch's next batch.
        cut_short = bool(self.batches_done) and not self.is_complete
        if not self.is_resuming or (not order and (mid_epoch or cut_short)):
            steps = self._batches_that_stepped
            super().reset()  # the beginning of an epoch, or a user's order, which Lightning resumes
            if self._resumes_with_uncounted_step is False:  # Lightning would count and validate again
                self._batches_that_stepped, self.restarting = steps, False
            return
        self.restarting = False  # no validation is left to repeat
        if not mid_epoch:
            super().reset()
            return
        assert order
        self.scheduler_progress.reset_on_restart()
        self.automatic_optimization.optim_progress.reset_on_restart()
        counts: Any = self.batch_progress.current
        is_uncounted = self._resumes_with_uncounted_step
        if is_uncounted is None:  # a checkpoint of stock Lightning
            is_uncounted = counts.ready == counts.processed <= order.first_batch
        self._batches_that_stepped += is_uncounted
        batches_done = order.first_batch
        vars(counts).update(ready=batches_done, started=batches_done, processed=batches_done, completed=batches_done)
        self.batch_progress.is_last_batch = batches_done >= self.trainer.num_training_batches

    def run(self, data_fetcher: Any) -> None:
        self._fetcher = data_fetcher
        self.reset()
        self._skipped_batches, self._counted_batches = 0, self.batches_done
        self.on_run_start(data_fetcher)
        self.share_stop()
        if self.agreements:
            self.agreements.check_lengths()
        is_trial: bool = self.trainer.fit_loop.is_trial  # type: ignore[attr-defined]
        records, self.record.is_enabled = self.record.is_enabled, self.record.is_enabled and not is_trial
        if isinstance(self.trainer.strategy, RunStrategy):
            self.trainer.strategy.synchronize_new_parameters()
        self._find_next_validation(max(0, self.batches_done - 1))  # Lightning may resume before a validation
        self._training_loop = self._training_loop_or_none(data_fetcher)
        try:
            while not (self.may_be_done and self.done):
                try:
                    self.advance(data_fetcher)
                    self.on_advance_end(data_fetcher)
                except StopIteration as error:
                    counts: Any = self.batch_progress.current
                    if counts.started > counts.processed and not stock.passes_iterator(data_fetcher):
                        problem = "StopIteration in a training step would end the epoch and leave samples out"
                        raise RuntimeError(problem) from error
                    if self.agreements:
                        self.agreements.check_data_end(data_fetcher)
                    self._skipped_batches = counts.processed - counts.completed
                    if self._skipped_batches and self.is_within_step:
                        self.record.discard_step()  # the next epoch begins with new gradients
                    break
                finally:
                    self.on_iteration_done()
            self.flush_metrics()
        finally:
            self._training_loop = None
            self.record.is_enabled = records

    def advance(self, data_fetcher: Any) -> None:
        if self.around_next_batch is not None and self.record.is_enabled:  # it is disabled in a finder's trial
            context, self.around_next_batch = self.around_next_batch, None
            with context:
                self.advance(data_fetcher)
            return
        self._metrics_are_current = False
        self.record.begin_batch(self._batches_that_stepped)
        if self._training_loop is not None and not self.restarting:
            self._training_loop.train_on_next()
        else:
            self.activity.begin_batch(self.global_step)
            super().advance(data_fetcher)

    def on_advance_end(self, data_fetcher: Any) -> None:
        training_loop = self._training_loop
        if may_validate := self._may_validate:
            self.flush_metrics()
        if training_loop is None or may_validate:
            super().on_advance_end(data_fetcher)
            self._find_next_validation(self.batch_progress.current.ready)
            if self.has_validated:
                self.share_stop()
        else:  # steps plateau schedulers and counts the optimizer step
            if any(config.reduce_on_plateau for config in self.trainer.strategy.lr_scheduler_configs):
                self.update_lr_schedulers("step", update_plateau_schedulers=True)
            if self.trainer.accumulate_grad_batches <= 1 or not self.should_accumulate():
                self._batches_that_stepped += 1
        self._counted_batches = self.batch_progress.current.processed  # type: ignore[attr-defined]
        if self.trainer.accumulate_grad_batches > 1 and self.should_accumulate():
            return
        trainer = self.trainer
        for method in self.subscribers.methods["on_step_done"]:
            method(trainer)
        if not self.is_complete:  # otherwise the safe point follows at the end of the epoch
            for method in self.subscribers.methods["on_safe_point"]:
                method(trainer)
            self.has_validated = False

    def reach_safe_point(self) -> None:
        """Calls the hooks of a safe point, where a run can be saved and can stop. All ranks must call."""
        self.subscribers.call("on_safe_point")
        self.has_validated = False

    def share_stop(self) -> None:
        """Sets `trainer.should_stop` on all ranks if one of them has set it. All ranks must call."""
        if self.agreements:
            self.agreements.share_stop()

    def _on_after_fetch(self) -> None:
        super()._on_after_fetch()
        if self.agreements:
            self.agreements.check_data_end(self._fetcher)

    def flush_metrics(self) -> None:
        """Updates the metrics that the Trainer shows with those of the last batch."""
        if not self._metrics_are_current:
            self.update_trainer_metrics()

    def update_trainer_metrics(self) -> Any:
        """Copies the last batch's metrics to those that the Trainer shows, and returns them."""
        self._metrics_are_current = True
        metrics = self.results.metrics(on_step=True)
        for kind, shown in stock.shown_metrics(self.trainer).items():
            shown.update(metrics[kind])
        return metrics

    @property
    def may_be_done(self) -> bool:
        """Whether the loop may be done after the last batch; a cheap check before Lightning's `done`."""
        trainer, progress = self.trainer, self.batch_progress
        return (
            self._training_loop is None
            or progress.is_last_batch
            or progress.current.ready >= trainer.num_training_batches
            or trainer.should_stop
            or (self.max_steps != -1 and self.global_step >= self.max_steps)
        )

    @property
    def _may_validate(self) -> bool:
        """Whether a validation may be due after the last batch; a cheap check before Lightning's own."""
        progress: Any = self.batch_progress
        return (
            self.trainer.should_stop
            or progress.current.ready >= self._next_validation
            or (progress.is_last_batch and self._next_validation != inf)
        )

    def _find_next_validation(self, batches: int) -> None:
        counts: Any = self.batch_progress
        earlier_batches, schedule = counts.total.ready - counts.current.ready, ValidationSchedule.of(self.trainer)
        self._next_validation = schedule.next_after(self.trainer.current_epoch, earlier_batches, batches)

    def _training_loop_or_none(self, data_fetcher: Any) -> TrainingLoop | None:
        """Returns the training loop, or None if Lightning's own loop must train; prints each new reason for that."""
        reason = fallback_reason(self.trainer, data_fetcher)
        if reason and reason not in self._reported:
            self._reported.add(reason)
            if self.trainer.is_global_zero:
                print_notice(f"using Lightning's slower training loop: {reason}")
        if self.compiled_step:
            self.compiled_step.check(reason)
        return None if reason else TrainingLoop(self, self.subscribers, data_fetcher)

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        validates = bool(super()._should_check_val_fx(data_fetcher))
        self.has_validated |= validates
        return validates

    def _broadcast_sigterm_tensor(self) -> None:
        """Does nothing; Lightning (since 2.5.2) runs a collective for signals in each step and waits for the device."""

    @property
    def _has_uncounted_step(self) -> bool | None:
        """True in the hooks and the validation after a step; Lightning counts the step after them."""
        if self._counted_batches is None:
            return self._resumes_with_uncounted_step
        counts: Any = self.batch_progress.current
        is_done = counts.ready == counts.processed > self._counted_batches
        return bool(is_done and not self._skipped_batches and not self.is_within_step)

    def on_save_checkpoint(self) -> dict[str, Any]:
        state = {"has_uncounted_step": self._has_uncounted_step, "loaders_epoch": self.loaders_epoch}
        return {**super().on_save_checkpoint(), **state}

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        super().on_load_checkpoint(state_dict)
        self._counted_batches = None
        self._resumes_with_uncounted_step = state_dict.get("has_uncounted_step")
        self.loaders_epoch = state_dict.get("loaders_epoch")
