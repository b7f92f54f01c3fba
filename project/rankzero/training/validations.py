"""Schedule of the validations in a fit. Does not import torch."""

from dataclasses import dataclass
from math import inf
from typing import Any


@dataclass(frozen=True)
class ValidationSchedule:
    """When a run validates, as Lightning (2.6) decides it.

    Attributes:
        epoch_batches: Number of batches in this epoch and in later ones; infinity if unknown.
        validation_interval: Batches between validations; infinity for the end of an epoch, None for intervals of time.
        validation_epochs: Epochs between epochs with validations; None if `validation_interval` spans epochs.
    """

    epoch_batches: float = inf
    validates: bool = False
    validation_interval: float | None = inf
    validation_epochs: int | None = 1

    @classmethod
    def of(cls, trainer: Any) -> "ValidationSchedule":
        """Returns the schedule of a Trainer in a fit."""
        interval, epochs = trainer.val_check_batch, trainer.check_val_every_n_epoch
        return cls(trainer.num_training_batches, trainer.enable_validation, interval, epochs)

    def count(self, epochs: int, earlier_batches: int, start: float, end: float) -> float:
        """Returns the number of validations after batches `start + 1` to `end`; with intervals of time, the most.

        `epochs` have ended, with `earlier_batches`. `start` and `end` count from the current epoch on, into later ones.
        """
        if not self.validates:
            return 0.0
        if self.validation_epochs is None:
            interval = self.validation_interval or 1
            return (earlier_batches + end) // interval - (earlier_batches + start) // interval
        return self._count_until(epochs, end) - self._count_until(epochs, start)

    def next_after(self, epochs: int, earlier_batches: int, done: int) -> float:
        """Returns after which batch of the current epoch the next validation may be due; infinity for none in it.

        A validation at the end of an epoch may come earlier, because the number of batches may be unknown.
        """
        if not self.validates or (self.validation_epochs and (epochs + 1) % self.validation_epochs):
            return inf
        if self.validation_interval is None or self.validation_interval == inf:
            return done + 1
        batches = done if self.validation_epochs else earlier_batches + done
        return done + self.validation_interval - batches % self.validation_interval

    def _count_until(self, epochs: int, batches: float) -> float:
        """Returns the number of validations after the first batches of the current epoch."""
        assert self.validation_epochs is not None
        interval, every = min(self.validation_interval or 1, self.epoch_batches), self.validation_epochs
        later, rest = divmod(batches, self.epoch_batches)
        last = epochs + int(later)
        full_epochs = last // every - epochs // every
        count = full_epochs * (self.epoch_batches // interval) if full_epochs else 0.0
        return count + (rest // interval if (last + 1) % every == 0 else 0.0)
