"""Makes all ranks of a fit stop together, and refuses data that ends earlier on some ranks."""

from typing import Any

from lightning.pytorch import Trainer

from rankzero.distributed.monitoring.activity import DATA
from rankzero.distributed.monitoring.hangs import ranks_text
from rankzero.distributed.stop_and_failure.agreement import Agreement
from rankzero.distributed.stop_and_failure.channel import ControlChannel
from rankzero.messages import RunError
from rankzero.training.hooks import LoopHooks
from rankzero.training.strategies import strategy_of

_ADVICE = "all ranks need the same number: set limit_train_batches=N, or end __iter__ of the dataset after N samples"


class RankAgreements(LoopHooks):
    """Ends training on all ranks together, and refuses training data of different lengths. All ranks must have it."""

    def __init__(self, channel: ControlChannel) -> None:
        self._channel = channel  # a copied trainer shares it, and could not copy an `Agreement`

    @property
    def _stop(self) -> Agreement:
        return self._channel.agreements["stop"]

    @property
    def _data_end(self) -> Agreement:
        return self._channel.agreements["end of data"]

    def on_ready(self, trainer: Trainer) -> None:
        if trainer.world_size == 1:
            return
        self._trainer, self._loop = trainer, trainer.fit_loop.epoch_loop
        self._loop.agreements = self  # type: ignore[attr-defined]
        self._activity = self._loop.activity  # type: ignore[attr-defined]
        self._forget_decision()
        self._stop.passed_in = lambda batch: self._activity.batches if self._has_ended_batch(batch) else 0
        self._stop.on_question = lambda: self._activity.listen(self._set_stop_when_due)
        counts: Any = self._loop.batch_progress.total
        self._data_end.passed_in = lambda batch: int(counts.ready) if counts.ready >= batch else 0

    def agree_on_stop(self) -> None:
        """Waits until the ranks agree on a stop that this rank has requested in the hooks of a batch.

        Unless all ranks have requested it, it is deferred to the next batch that no rank has begun.
        """
        decision = self._stop.reach(self._activity.batches, keeps_decision=True)
        self._trainer.should_stop = self._activity.batches >= decision.batch

    def share_stop(self) -> None:
        """Sets `trainer.should_stop` on all ranks if one of them has set it. All ranks must call."""
        decision = self._stop.decision
        stops = self._trainer.should_stop or (decision is not None and self._activity.batches < decision.batch)
        self._trainer.should_stop = strategy_of(self._trainer).sum_over_ranks([int(stops)]) != [0]
        if not self._trainer.should_stop:
            self._forget_decision()

    def check_lengths(self) -> None:
        """Raises a RunError if the ranks have different numbers of batches in this epoch. All ranks must call."""
        trainer = self._trainer
        if not trainer.fit_loop.plan.unmanaged_loaders:  # type: ignore[attr-defined]
            return
        steps_left = float("inf") if trainer.max_steps == -1 else trainer.max_steps - trainer.global_step
        # An epoch with more batches is ended by `max_steps`, on all ranks in the same step.
        most = self._loop.batches_done + steps_left * trainer.accumulate_grad_batches + 1  # type: ignore[attr-defined]
        lengths = strategy_of(trainer).gather(min(trainer.num_training_batches, most))
        if len(set(lengths)) > 1:
            numbers = ", ".join(map(str, lengths))
            raise RunError(f"the ranks have different numbers of training batches ({numbers}); {_ADVICE}")

    def check_data_end(self, fetcher: Any) -> None:
        """Raises a RunError, which prints no traceback, if this rank's data has ended and another rank has more."""
        trainer, loop = self._trainer, self._loop
        # A training_step with a `dataloader_iter` reads ahead as it likes.
        if not trainer.fit_loop.plan.unmanaged_loaders or not hasattr(fetcher, "prefetch_batches") or not fetcher.done:  # type: ignore[attr-defined]
            return
        if fetcher.fetched >= trainer.num_training_batches:
            return
        batch = loop.batch_progress.total.ready + 1
        decision = self._data_end.reach(batch)
        if decision.batch != batch:
            others = set(range(trainer.world_size)) - set(decision.ranks)
            raise RunError(
                f"the training data of {ranks_text([trainer.global_rank])} ended after {fetcher.fetched} batches of "
                f"epoch {trainer.current_epoch}, and {ranks_text(others) if others else 'another rank'} has more; "
                f"{_ADVICE}"
            )

    def _forget_decision(self) -> None:
        self._stop.decision = None
        self._activity.stop_listening(self._set_stop_when_due)

    def _has_ended_batch(self, batch: int) -> bool:
        """Returns whether the hooks of a batch are done; a thread calls this, so that the order of reads matters."""
        counts: Any = self._loop.batch_progress.current
        begun: int = self._activity.batches
        is_after_hooks: bool = self._activity.phase != DATA and counts.completed == counts.ready
        return begun > batch or (begun == batch and is_after_hooks)

    def _set_stop_when_due(self, phase: str) -> None:
        """Called when this rank begins a batch while others wait, or after the decision."""
        if phase != DATA or not self._has_ended_batch(self._stop.asked_batch):
            return
        decision = self._stop.wait()
        if self._activity.batches >= decision.batch:
            self._trainer.should_stop |= self._activity.batches == decision.batch
            self._activity.stop_listening(self._set_stop_when_due)
