"""A failure is known to all ranks before anything else is done about it."""

import logging
import socket
import traceback

from lightning.pytorch import LightningModule, Trainer

from rankzero.distributed.control.channel import ControlChannel
from rankzero.messages import Stopped, lost_contact, user_message
from rankzero.runs.attempt import Outcome
from rankzero.training.fit_loop import fit_loop_of
from rankzero.training.hooks import LoopCallback


class ReportFailure(LoopCallback):
    """Tells all ranks at once, as the first callback: one behind it may wait for them, as `OnExceptionCheckpoint` does.

    Args:
        control_channel: Through which they are told.
        outcome: How the training goes, which this callback fills in.
    """

    def __init__(self, control_channel: ControlChannel, outcome: Outcome) -> None:
        self.control_channel, self.outcome = control_channel, outcome
        self._batches_before: int | None = None

    def on_ready(self, trainer: Trainer) -> None:
        self._batches_before = fit_loop_of(trainer).epoch_loop.batch_progress.total.processed

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        batches = fit_loop_of(trainer).epoch_loop.batch_progress.total.processed
        self.outcome.begun |= self._batches_before is not None and batches > self._batches_before
        if not isinstance(exception, Exception) or isinstance(exception, Stopped) or lost_contact(exception):
            return
        if not self.outcome.begun and user_message(exception) is not None:
            return  # the run is not begun, and whoever started it is told why
        self.outcome.error = exception
        logging.getLogger("rankzero").error("".join(traceback.format_exception(exception)))
        self.control_channel.report_failure(
            f"rank {trainer.global_rank} on {socket.gethostname()} failed: {exception!r}"
        )
