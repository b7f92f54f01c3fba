"""How many samples a run has trained on, and how fast."""

import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from rankzero.sampling.batch_sampler import EVEN
from rankzero.sampling.plan import SamplingPlan
from rankzero.training.hooks import LoopCallback


class Throughput(LoopCallback):
    """Counts training samples over all ranks, and the seconds spent training on them (validation excluded).

    Args:
        plan: Knows how many samples each global batch holds.
    """

    def __init__(self, plan: SamplingPlan) -> None:
        self.plan = plan
        self.samples = 0
        """Over all attempts."""
        self.samples_now = 0
        """In this attempt."""
        self.seconds = 0.0
        """In this attempt."""
        self._since: float | None = None

    @property
    def samples_per_second(self) -> float:
        """Over all ranks, in this attempt."""
        seconds = self.seconds + (time.perf_counter() - self._since if self._since is not None else 0.0)
        return self.samples_now / seconds if seconds > 0 else 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._since = time.perf_counter()  # within a resumed epoch Lightning does not call on_train_epoch_start

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
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
        self.samples += count
        self.samples_now += count

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pause()
        if trainer.logger is not None:
            # At the step at which Lightning logs the epoch's other metrics: a run that is carried on keeps them all.
            step = max(0, trainer.global_step - 1)
            trainer.logger.log_metrics({"train/samples_per_second": self.samples_per_second}, step)

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.samples = state_dict["samples"]

    def _pause(self) -> None:
        if self._since is not None:
            self.seconds += time.perf_counter() - self._since
            self._since = None
