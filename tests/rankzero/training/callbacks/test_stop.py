import functools
import signal

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.demos.boring_classes import BoringModel

from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.rendezvous.peers import Peer
from rankzero.distributed.stop_and_failure.channel import ControlChannel
from rankzero.messages import SaveError, Stopped
from rankzero.runs.checkpoints.checkpoint_io import DirectoryCheckpointIO
from rankzero.runs.checkpoints.manifest import checkpoints_in
from rankzero.runs.directory import RunDirectory
from rankzero.training.callbacks.checkpointing import CheckpointCallback, Interval
from rankzero.training.callbacks.finite_weights import FiniteWeights
from rankzero.training.callbacks.stop import NoSignalConnector, StopAtSafePoint
from rankzero.training.fit_loop import fit_loop_of
from running import train_in_process
from stock import SILENT


class RequestStop(Callback):
    """Installs `StopAtSafePoint`, and requests a stop in one of Lightning's hooks."""

    def __init__(self, stop, hook, occurrence=0):
        self.stop, self.hook, self.occurrence, self.called_hooks = stop, hook, occurrence, []

    def setup(self, trainer, pl_module, stage):
        fit_loop_of(trainer).extra_subscribers.append(self.stop)

    def record(self, hook, trainer, *arguments):
        self.called_hooks.append(hook)
        if (hook, self.called_hooks.count(hook) - 1) == (self.hook, self.occurrence):
            for reason in ("SIGTERM", "SIGUSR1"):
                self.stop.control_channel.request_stop(reason)


for _hook in ("on_train_batch_start", "on_train_batch_end", "on_validation_end", "on_train_epoch_end"):
    setattr(RequestStop, _hook, functools.partialmethod(RequestStop.record, _hook))


@pytest.fixture
def channel():
    return ControlChannel(Launch(), [Peer.this(Launch())], lambda value: [value])


@pytest.fixture
def checkpoints(tmp_path):
    return CheckpointCallback(RunDirectory(tmp_path / "x"), Interval(epochs=9), lambda: {"run": "x"})


def train(channel, checkpoints, hook="", occurrence=0, **settings):
    """Trains 2 epochs of 4 batches; returns the hooks that were called, and the reason and step of the stop."""
    request_stop = RequestStop(
        StopAtSafePoint(channel, checkpoints, FiniteWeights(channel, stops=False)), hook, occurrence
    )
    model, reason = BoringModel(), None
    settings = {"limit_train_batches": 4, "max_epochs": 2, "num_sanity_val_steps": 0, **settings}
    settings |= {"plugins": [DirectoryCheckpointIO()], "enable_checkpointing": checkpoints is not None}
    try:
        train_in_process(request_stop, *filter(None, [checkpoints]), model=model, loops=True, **settings)
    except Stopped as stopped:
        reason = stopped.reason
    return request_stop.called_hooks, (reason, model.trainer.global_step)


def saved_steps(checkpoints):
    return [int(path.name.removeprefix("step-")) for path in checkpoints_in(checkpoints.run.checkpoints)]


@pytest.mark.parametrize(
    ("hook", "occurrence", "micro_batches", "step"),
    [
        ("on_train_batch_start", 0, 1, 1),
        ("on_train_batch_start", 3, 1, 4),
        ("on_train_epoch_end", 0, 1, 4),
        ("on_validation_end", 0, 1, 4),
        ("on_train_batch_end", 5, 1, 6),
        ("on_train_batch_end", 0, 3, 1),
        ("on_train_batch_end", 2, 3, 1),
    ],
)
def test_run_stops_after_the_current_step_and_saves_it(channel, checkpoints, hook, occurrence, micro_batches, step):
    """The first reason counts. A validation or the end of an epoch that has begun is completed before the stop."""
    settings = {"accumulate_grad_batches": micro_batches}
    called_hooks, stopped = train(channel, checkpoints, hook, occurrence, **settings)
    assert stopped == ("SIGTERM", step) and saved_steps(checkpoints) == [step]
    assert called_hooks.count("on_train_batch_end") == step * micro_batches
    assert called_hooks.count("on_validation_end") == called_hooks.count("on_train_epoch_end") == step // 4


def test_stop_request_before_the_first_step_stops_before_training(channel, checkpoints):
    channel.request_stop("SIGINT")
    assert train(channel, checkpoints) == ([], ("SIGINT", 0)) and saved_steps(checkpoints) == [0]


@pytest.mark.parametrize(("hook", "occurrence"), [("", 0), ("on_train_batch_start", 7), ("on_validation_end", 1)])
def test_no_stop_request_or_one_in_the_last_step_lets_the_run_finish(channel, checkpoints, hook, occurrence):
    _, stopped = train(channel, checkpoints, hook, occurrence)
    assert stopped == (None, 8) and saved_steps(checkpoints) == [8]


def test_run_without_checkpoints_stops_after_the_current_step(channel):
    assert train(channel, None, "on_train_batch_end", 1)[1] == ("SIGTERM", 2)


def test_run_that_cannot_save_raises_a_save_error(channel, checkpoints, capsys):
    checkpoints.run.checkpoints.parent.mkdir()
    checkpoints.run.checkpoints.write_text("a file")
    with pytest.raises(SaveError, match="step-00000002 could not be saved"):
        train(channel, checkpoints, "on_train_batch_end", 1)
    assert "step-00000002 could not be saved" in capsys.readouterr().err


def handlers():
    return {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}


def test_trainer_keeps_signal_handlers_unlike_stock_lightning():
    before, during_training = handlers(), []
    recorder = LambdaCallback(on_train_start=lambda *arguments: during_training.append(handlers()))
    trainer = Trainer(max_steps=1, callbacks=[recorder], limit_val_batches=0, **SILENT)
    trainer._signal_connector = NoSignalConnector(trainer)
    trainer.fit(BoringModel())
    assert during_training == [before] and handlers() == before and not trainer._signal_connector.received_sigterm
