"""Sample ledger: checks for each epoch that every sample was used exactly once."""

import logging
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from rankzero.sampling.permutation import Ledger, expected_sums
from rankzero.sampling.plan import SamplingPlan
from rankzero.training.fit_loop import fit_loop_of
from rankzero.training.hooks import LoopCallback
from rankzero.training.strategies import strategy_of


class SamplesDifferError(RuntimeError):
    """Raised if an epoch did not use every sample once; always a bug in Rankzero, never the user's mistake."""


class SampleLedger(LoopCallback):
    """Reports at the end of each epoch which samples were used, over all ranks and attempts.

    With several training loaders, nothing is reported.
    """

    def __init__(self, plan: SamplingPlan) -> None:
        self.plan = plan
        self._entries: list[str] = []
        self._partial_entry: str | None = None
        self._ledger, self._counted_batches = Ledger(), 0
        self._trainer: Trainer | None = None

    @property
    def entries(self) -> list[str]:
        """One line for each epoch since the run began, and one for an epoch that was cut short."""
        return self._entries + ([self._partial_entry] if self._partial_entry else [])

    def on_ready(self, trainer: Trainer) -> None:
        order = self.plan.only_order
        if order is None:
            return
        self._trainer, self._counted_batches = trainer, order.first_batch
        order.on_many_in_flight = self._count_steps
        if not order.start_position.samples:
            self._entries, self._partial_entry = self.entries, None
            self._ledger = Ledger()  # the epoch starts from its beginning; earlier uses of its samples do not count

    def _count_steps(self) -> None:
        """Adds to the ledger the samples of the optimizer steps since the previous call.

        The batches of an incomplete step are not added: its gradients are in no checkpoint, so that a resumed run
        trains on these batches again.
        """
        order = self.plan.only_order
        assert order is not None and self._trainer is not None
        loop = fit_loop_of(self._trainer)
        if loop.is_trial:
            order.in_flight.clear()
            return
        batches = loop.epoch_loop.batches_in_steps
        for _ in range(batches - self._counted_batches):
            self._ledger.use(order.in_flight.popleft())
        self._counted_batches = batches

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if order := self.plan.only_order:  # a new object if the loaders were created again since the last epoch
            order.on_many_in_flight = self._count_steps

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks the samples of the epoch over all ranks and logs the result. All ranks must call.

        Raises:
            SamplesDifferError: A sample was left out, or used more than once.
        """
        order = self.plan.only_order
        if order is None:
            return
        self._count_steps()
        consumed = order.consumed(self._counted_batches)
        used = strategy_of(trainer).sum_over_ranks(self._ledger.sums)
        if used != expected_sums(order.order(), order.count, consumed):
            raise SamplesDifferError(
                f"epoch {order.epoch + 1}: {consumed:,} of {order.count:,} samples should have been used, each once, "
                f"but {used[0]:,} were drawn, and not those. This is a defect of Rankzero; please report it"
            )
        noun = order.drawn.name if order.drawn else "samples"
        entry = f"epoch {order.epoch + 1}: {consumed:,} of {order.count:,} {noun}, each once"
        if fit_loop_of(trainer).epoch_loop.is_complete:
            self._entries.append(entry)
            self._ledger, self._counted_batches = Ledger(), 0
        else:  # the run ends here and may be resumed
            self._partial_entry = f"{entry} so far"
        logging.getLogger("rankzero").info(self.entries[-1])

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Saves the ledger, summed over ranks. All ranks must call."""
        if self._trainer is not None and fit_loop_of(self._trainer).is_within_epoch:
            self._count_steps()
        used = strategy_of(trainer).sum_over_ranks(self._ledger.sums)
        checkpoint["ledger"] = {"sums": used, "statements": list(self._entries)}
        if any(order.drawn for order in self.plan.training_orders):
            checkpoint["draws"] = [order.drawn and order.drawn.state() for order in self.plan.training_orders]
        if streams := self.plan.streams:
            loop = fit_loop_of(trainer)
            is_within, is_complete = loop.is_within_epoch, loop.epoch_loop.is_complete
            # Lightning counts an epoch that `max_steps` has cut short as done.
            checkpoint["streams"] = [
                each.state(is_within or not (is_complete or each.is_exhausted)) for each in streams
            ]

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.plan.kept_draws, self.plan.kept_streams = checkpoint.get("draws", []), checkpoint.get("streams", [])
        if saved := checkpoint.get("ledger"):
            self._entries = list(saved["statements"])
            self._ledger = Ledger(saved["sums"]) if self.plan.rank == 0 else Ledger()
