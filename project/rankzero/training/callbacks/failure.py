"""A failure is known to all ranks before anything else is done about it."""

import logging
import socket
import traceback
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from rankzero.distributed.control.channel import Lifeline
from rankzero.messages import Stopped, lost_contact, mistake
from rankzero.training.hooks import LoopCallback


class FailTogether(LoopCallback):
    """Tells all ranks at once, as the first callback: one behind it may wait for them, as `OnExceptionCheckpoint` does.

    Args:
        lifeline: Through which they are told.

    Attributes:
        begun: Whether a batch has been trained on in this attempt.
        error: What this rank has failed of; None where it has not, or only because another one has.
    """

    def __init__(self, lifeline: Lifeline) -> None:
        self.lifeline = lifeline
        self.begun = False
        self.error: Exception | None = None

    def on_batch_done(self, trainer: Trainer, batch: Any, batch_idx: int) -> None:
        self.begun = True

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if not isinstance(exception, Exception) or isinstance(exception, Stopped) or lost_contact(exception):
            return
        if not self.begun and mistake(exception) is not None:
            return  # the run is not begun, and whoever started it is told why
        self.error = exception
        logging.getLogger("rankzero").error("".join(traceback.format_exception(exception)))
        self.lifeline.fail(f"rank {trainer.global_rank} on {socket.gethostname()} failed: {exception!r}")
