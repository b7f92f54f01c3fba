"""A run stops where a person, a scheduler or the clock wants it to: on all ranks behind the same step, and saved."""

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

from rankzero.distributed.control.channel import Lifeline
from rankzero.messages import Stopped
from rankzero.training.callbacks.checkpointing import SaveCheckpoints
from rankzero.training.fit_loop import fit_loop_of
from rankzero.training.hooks import LoopHooks


class StopSafely(LoopHooks):
    """Saves and leaves at a safe point that all ranks have agreed on. All ranks must have it, behind what saves.

    Args:
        lifeline: Through which they agree.
        saving: What saves; None where checkpoints are not wanted.
    """

    in_trials = True

    def __init__(self, lifeline: Lifeline, saving: SaveCheckpoints | None) -> None:
        self.lifeline, self.saving = lifeline, saving

    def on_safe_point(self, trainer: Trainer) -> None:
        """All ranks must call.

        Raises:
            Stopped: On all ranks.
            SaveError: On all ranks: what they stop with could not be saved.
        """
        reason = self.lifeline.at_safe_point()
        if reason is None or fit_loop_of(trainer).done:
            return
        if self.saving and not fit_loop_of(trainer).is_trial:
            self.saving.save_for_good(trainer)
        raise Stopped(reason)


class NoSignals(_SignalConnector):
    """Stands in for what handles signals in a Trainer (lightning 2.6).

    That one has SIGTERM call a collective within the handler, so that a signal to one of two ranks has both wait.
    """

    def register_signal_handlers(self) -> None:
        """Leaves all signals to `rankzero.distributed.process.stop_signals`."""
