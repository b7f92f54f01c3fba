"""SIGTERM ends a run as Ctrl-C does."""

import signal
import threading

from lightning.pytorch import Callback, LightningModule, Trainer


class LeaveOnSigterm(Callback):
    """Leaves at SIGTERM, each rank for itself.

    Takes the place of Lightning's handler (2.6), which has the ranks agree by a collective in every step: a signal that
    reaches them at different steps leaves one waiting for the other.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.default_int_handler)
