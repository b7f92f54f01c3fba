"""Which validation is the last."""

import math

from lightning.pytorch import Trainer

from rankzero.training.fit_loop import fit_loop_of


def is_last_validation(trainer: Trainer) -> bool:
    """Returns whether no validation will follow the current one in this run, as far as is known (lightning 2.6)."""
    fit_loop, interval = fit_loop_of(trainer), trainer.val_check_batch
    loop = fit_loop.epoch_loop
    batches, max_epochs, epochs = trainer.num_training_batches, trainer.max_epochs, trainer.check_val_every_n_epoch
    left_in_epoch = 0 if loop.batch_progress.is_last_batch else max(0, batches - loop.batches_done)
    remaining = math.inf
    if max_epochs not in (None, -1):
        later_epochs = max_epochs - 1 - trainer.current_epoch
        remaining = left_in_epoch + (later_epochs * batches if later_epochs > 0 else 0)
    if trainer.max_steps != -1:
        steps = max(0, trainer.max_steps - trainer.global_step)
        remaining = min(remaining, steps * trainer.accumulate_grad_batches)
    if remaining <= 0 or (trainer.should_stop and fit_loop._can_stop_early):
        return True
    if interval is None or interval == math.inf:  # validations are due at intervals of time, or after unknown batches
        return False
    until_next = float(interval)
    if epochs is not None and left_in_epoch < interval:
        until_next = left_in_epoch + (epochs - 1) * batches + min(interval, batches)
    return until_next > remaining
