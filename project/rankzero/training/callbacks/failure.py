"""Reports a failure to all ranks before anything else handles it."""

import logging
import traceback

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from rankzero.distributed.monitoring.activity import BACKWARD, END
from rankzero.distributed.process.user_traceback import user_position
from rankzero.distributed.stop_and_failure.channel import ControlChannel
from rankzero.messages import CannotStart, Stopped, is_peer_failure, mark_advice, user_message
from rankzero.runs.attempt import Outcome
from rankzero.training.hooks import LoopCallback
from rankzero.training.strategies import RunStrategy, strategy_of


class ReportFailure(LoopCallback):
    """Reports an exception to all ranks at once. Must come before the user's callbacks.

    A later callback may wait for the other ranks, as `OnExceptionCheckpoint` does.

    Args:
        control_channel: The control channel of this rank.
        outcome: Receives the error.
        wait: Seconds to wait for all ranks to raise an error, after which the program may go on; 0 if it never does.
    """

    def __init__(self, control_channel: ControlChannel, outcome: Outcome, wait: float = 0) -> None:
        self.control_channel, self.outcome, self._wait = control_channel, outcome, wait
        self._batches_before: int | None = None

    def on_ready(self, trainer: Trainer) -> None:
        self._batches_before = trainer.fit_loop.epoch_loop.batch_progress.total.processed  # type: ignore[attr-defined]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._update_has_trained(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._update_has_trained(trainer)
        if not isinstance(exception, Exception) or isinstance(exception, Stopped):
            return
        if is_peer_failure(exception):
            self.control_channel.failure_cause()  # the main thread is about to exit
            return
        if isinstance(exception, CannotStart) and trainer.state.fn is not TrainerFn.FITTING:
            return  # an evaluation after the training, which all ranks refuse
        if not self.outcome.has_trained and user_message(exception) is not None:
            return  # training has not begun, and the user gets the error's own message
        if trainer.training and type(exception).__name__ == "OutOfMemoryError":  # of a GPU
            mark_advice(exception, _smaller_batch(trainer))
        self.outcome.error = exception
        logging.getLogger("rankzero").error("".join(traceback.format_exception(exception)))
        channel = self.control_channel
        if self._wait and channel.monitor.activity.phase != BACKWARD and self._is_on_all_ranks(trainer, exception):
            return
        channel.report_failure(f"{channel.world.name_of(channel.rank)} failed: {exception!r}")
        if isinstance(trainer.strategy, RunStrategy):
            trainer.strategy.refuse_collectives()

    def _is_on_all_ranks(self, trainer: Trainer, error: Exception) -> bool:
        """Returns whether all ranks have raised the error in the same line, so that the script may catch it and go on.

        In the backward pass, a rank may have begun other collectives than the others.
        """
        channel, activity = self.control_channel, self.control_channel.monitor.activity
        phase = activity.phase
        place = [trainer.state.fn, phase, activity.batches, trainer.current_epoch]
        activity.enter(END)  # to wait for the other ranks is no hang
        is_same = channel.is_same_on_all_ranks(repr([type(error), user_position(error), place]), self._wait)
        activity.enter(phase)
        return is_same

    def _update_has_trained(self, trainer: Trainer) -> None:
        before, batches = self._batches_before, trainer.fit_loop.epoch_loop.batch_progress.total
        self.outcome.has_trained |= before is not None and batches.processed > before  # type: ignore[attr-defined]


def _smaller_batch(trainer: Trainer) -> str:
    """Returns the flag with which training needs less memory of the GPU; empty if no batch size is known."""
    order = strategy_of(trainer).plan.order
    if order is None or order.device_batch_size < 2:
        return ""
    flag, effect = "--max_device_batch_size", ", which keeps the samples of a step and accumulates its gradients"
    if not trainer.lightning_module.automatic_optimization:
        flag, effect = "--batch_size", ""
    size = order.device_batch_size
    return f"The GPU had {size} samples at a time; type {flag} {size // 2}{effect}"
