"""What both kinds of progress show of a validation, a test or a prediction: one method for the batches of all three."""

from collections.abc import Sequence
from math import isfinite
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from rankzero.tracking.progress.fit_progress import epoch_text
from rankzero.training.hooks import LoopCallback


class EvaluationProgress(LoopCallback):
    """Calls `show_evaluation` after each batch of a validation, a test or a prediction."""

    def show_evaluation(self, trainer: Trainer, batches: int, loader: int) -> None:
        """Shows the progress of an evaluation.

        Args:
            trainer: The Trainer.
            batches: Number of batches of the loader that are done.
            loader: Number of the loader, from 0.
        """
        raise NotImplementedError

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self.show_evaluation(trainer, batch_idx + 1, dataloader_idx)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end


def evaluation_label(trainer: Trainer) -> str:
    """Returns what the Trainer evaluates, such as `epoch 3/20 validation` or `test`."""
    if trainer.sanity_checking:
        return "validation before training"
    labels: dict[TrainerFn | None, str] = {
        TrainerFn.FITTING: f"{epoch_text(trainer)} validation",
        TrainerFn.TESTING: "test",
        TrainerFn.PREDICTING: "prediction",
    }
    return labels.get(trainer.state.fn, "validation")


def evaluation_batches(trainer: Trainer) -> Sequence[float]:
    """Returns the number of batches of each loader in the current evaluation."""
    if trainer.sanity_checking:
        return trainer.num_sanity_val_batches
    if trainer.state.fn is TrainerFn.TESTING:
        return trainer.num_test_batches
    return trainer.num_predict_batches if trainer.state.fn is TrainerFn.PREDICTING else trainer.num_val_batches


def batches_text(batches: int, totals: Sequence[float], loader: int) -> str:
    """Returns how far an evaluation has come, as `batch 3/8` or `batch 3/8 of loader 1/2`."""
    text = batch_text(batches, totals[loader])
    return f"{text} of loader {loader + 1}/{len(totals)}" if len(totals) > 1 else text


def batch_text(batches: int, total: float) -> str:
    """Returns the number of batches as `batch 3/8`; without a known total as `batch 3`."""
    return f"batch {batches}/{total}" if isfinite(total) else f"batch {batches}"
