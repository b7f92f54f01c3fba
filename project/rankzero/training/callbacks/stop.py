"""Stops a run at a safe point: after the same step on all ranks, with a checkpoint saved."""

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

from rankzero.distributed.stop_and_failure.channel import ControlChannel
from rankzero.messages import Stopped
from rankzero.training.callbacks.checkpointing import CheckpointCallback
from rankzero.training.fit_loop import fit_loop_of
from rankzero.training.hooks import LoopHooks


class StopAtSafePoint(LoopHooks):
    """Saves and leaves at a safe point that all ranks have agreed on. All ranks must have it, behind what saves.

    Args:
        control_channel: Through which they agree.
        saving: What saves; None where checkpoints are not wanted.
    """

    in_trials = True

    def __init__(self, control_channel: ControlChannel, saving: CheckpointCallback | None) -> None:
        self.control_channel, self.saving = control_channel, saving

    def on_safe_point(self, trainer: Trainer) -> None:
        """All ranks must call.

        Raises:
            Stopped: On all ranks.
            SaveError: On all ranks: what they stop with could not be saved.
        """
        reason = self.control_channel.check_stop()
        if reason is None or fit_loop_of(trainer).done:
            return
        if self.saving and not fit_loop_of(trainer).is_trial:
            self.saving.save_and_wait(trainer)
        raise Stopped(reason)


class NoSignalConnector(_SignalConnector):
    """Stands in for what handles signals in a Trainer (lightning 2.6).

    That one has SIGTERM call a collective within the handler, so that a signal to one of two ranks has both wait.
    """

    def register_signal_handlers(self) -> None:
        """Leaves all signals to `rankzero.distributed.process.stop_signals`."""
