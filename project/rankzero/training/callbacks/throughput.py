"""How many samples a run has trained on, and how fast."""

import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from rankzero.sampling.batch_sampler import EVEN
from rankzero.sampling.plan import SamplingPlan
from rankzero.training.fit_loop import fit_loop_of
from rankzero.training.hooks import LoopCallback


class Throughput(LoopCallback):
    """Counts training samples over all ranks, and the seconds spent training on them (validation excluded).

    Args:
        plan: Knows how many samples each global batch holds.
    """

    def __init__(self, plan: SamplingPlan) -> None:
        self.plan = plan
        self._samples = self._samples_now = self._consumed = 0
        self._trainer: Trainer | None = None
        self.seconds = 0.0
        """In this attempt."""
        self._since: float | None = None

    @property
    def samples_per_second(self) -> float:
        """Over all ranks, in this attempt."""
        seconds = self.seconds + (time.perf_counter() - self._since if self._since is not None else 0.0)
        return self.samples_now / seconds if seconds > 0 else 0.0

    @property
    def samples(self) -> int:
        """Samples of all attempts."""
        self._settle()
        return self._samples

    @property
    def samples_now(self) -> int:
        """Samples of this attempt."""
        self._settle()
        return self._samples_now

    def needs(self, hook: str) -> bool:
        return hook != "on_batch_done" or self.plan.only_order is None  # whose samples are known by their number

    def on_ready(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._consumed = self.plan.only_order.start_position.samples if self.plan.only_order else 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._since = time.perf_counter()  # within a resumed epoch Lightning does not call on_train_epoch_start

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._consumed = 0
        self._since = time.perf_counter()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pause()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._since = time.perf_counter()

    def on_batch_done(self, trainer: Trainer, batch: Any, batch_idx: int) -> None:
        orders = self.plan.training
        share = getattr(trainer.strategy, "share", EVEN)  # of the batch, where the run's own strategy deals it
        if share is not EVEN:
            count = share.total
        elif orders:
            count = sum(order.samples_in(batch_idx) for order in orders)
        else:  # somebody else's order: this rank's share stands for the others'
            try:
                count = extract_batch_size(batch) * trainer.world_size
            except MisconfigurationException:  # a batch of a kind of its own, whose samples nobody can count
                count = 0
        self._add(count)

    def _add(self, count: int) -> None:
        self._samples += count
        self._samples_now += count

    def _settle(self, at_end: bool = False) -> None:
        """Counts the batches of the epoch that is under way, or ends here, that were not counted before."""
        order, loop = self.plan.only_order, fit_loop_of(self._trainer) if self._trainer else None
        if order is not None and loop is not None and (at_end or loop.is_within_epoch):
            consumed = order.consumed(loop.epoch_loop.batches_trained)
            self._add(consumed - self._consumed)
            self._consumed = consumed

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._settle(at_end=True)
        self._pause()
        # At the step at which Lightning logs the epoch's other metrics: a run that is resumed keeps them all.
        step = max(0, trainer.global_step - 1)
        for logger in trainer.loggers:
            logger.log_metrics({"train/samples_per_second": self.samples_per_second}, step)

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._samples = state_dict["samples"]

    def _pause(self) -> None:
        if self._since is not None:
            self.seconds += time.perf_counter() - self._since
            self._since = None
