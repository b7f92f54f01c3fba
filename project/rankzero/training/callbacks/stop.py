"""Stops a run at a safe point: after the same step on all ranks, with a checkpoint saved."""

from lightning.pytorch import Trainer

from rankzero.distributed.stop_and_failure.channel import ControlChannel
from rankzero.messages import Stopped
from rankzero.training.callbacks.checkpointing import CheckpointCallback
from rankzero.training.callbacks.finite_weights import FiniteWeights
from rankzero.training.fit_loop import fit_loop_of
from rankzero.training.hooks import LoopHooks
from rankzero.training.lightning_inside import SignalConnector


class StopAtSafePoint(LoopHooks):
    """Saves and stops at a safe point that all ranks agreed on.

    All ranks must have it, after the checkpoint callback.
    """

    in_trials = True

    def __init__(
        self, control_channel: ControlChannel, checkpoint_callback: CheckpointCallback | None, weights: FiniteWeights
    ) -> None:
        self.control_channel, self.checkpoint_callback, self.weights = control_channel, checkpoint_callback, weights

    def on_safe_point(self, trainer: Trainer) -> None:
        """Stops here if all ranks have agreed on this safe point. All ranks must call.

        Raises:
            Stopped: The run stops; raised on all ranks.
            RunError: The last checkpoint could not be saved, or the weights are not finite; raised on all ranks.
        """
        reason = self.control_channel.check_stop()
        if reason is None or fit_loop_of(trainer).done:
            return
        if self.checkpoint_callback and not fit_loop_of(trainer).is_trial:
            self.checkpoint_callback.save_and_wait(trainer)
        self.weights.end_if_final(trainer)
        raise Stopped(reason)


class NoSignalConnector(SignalConnector):
    """Replacement for the Trainer's signal connector (lightning 2.6).

    Lightning's handler of SIGTERM calls a collective, so a signal to one of two ranks blocks both.
    """

    def register_signal_handlers(self) -> None:
        """Does nothing: `rankzero.distributed.process.stop_signals` handles all signals."""
