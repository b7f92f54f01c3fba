import logging
import socket

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader

from data_modules.in_memory import at_least
from rankzero.distributed.stop_and_failure.channel import ControlChannel
from rankzero.distributed.world import World
from rankzero.messages import AnotherRankFailed, CannotStart, SaveError, Stopped, advice_of
from rankzero.runs.attempt import Outcome
from rankzero.sampling.plan import SamplingPlan
from rankzero.training.callbacks.failure import ReportFailure
from running import train_in_process
from stock import SILENT


class Channel(ControlChannel):
    """Unconnected channel that records its reports; a connected channel would terminate this process."""

    def __init__(self):
        super().__init__(World(), None)
        self.reported = []

    def report_failure(self, cause):
        self.reported.append(cause)
        return super().report_failure(cause)


@pytest.fixture
def callback():
    return ReportFailure(Channel(), Outcome())


with pytest.raises(ValueError, match="batch_size") as raised_on_purpose:
    at_least(1, "batch_size", 0)
EXPLAINED = [CannotStart("no such data"), MisconfigurationException("no such strategy"), SaveError("full")]
EXPLAINED += [raised_on_purpose.value]
UNEXPLAINED = [RuntimeError("no such layer"), ValueError("no such value"), KeyError("x"), OSError("no such file")]
OF_OTHERS = [
    *(Stopped("SIGTERM"), SystemExit(3), KeyboardInterrupt()),
    *(AnotherRankFailed("rank 1"), RuntimeError("[gloo/x.cc:81] Connection closed by peer [127.0.0.1]:1")),
]
"""A stop, an exit, and failures of other ranks."""


@pytest.mark.parametrize("has_trained", [False, True])
@pytest.mark.parametrize("error", EXPLAINED + UNEXPLAINED + OF_OTHERS, ids=repr)
def test_error_is_reported_unless_its_message_or_another_rank_explains_it(callback, error, has_trained, caplog):
    """After the first batch, an error that explains itself is reported too."""
    callback.outcome.has_trained = has_trained
    try:
        raise error
    except BaseException as raised:  # the raised error has a traceback
        trainer = Trainer(**SILENT)
        trainer.state.fn = TrainerFn.TESTING
        if isinstance(error, CannotStart):
            callback.on_exception(trainer, BoringModel(), raised)  # all ranks refuse an evaluation
        trainer.state.fn = TrainerFn.FITTING
        callback.on_exception(trainer, BoringModel(), raised)
    reported = callback.control_channel.reported
    if error in OF_OTHERS or (error in EXPLAINED and not has_trained):
        assert reported == [] and callback.outcome.error is None
        return
    assert reported == [f"rank 0 on {socket.gethostname()} failed: {error!r}"]
    assert callback.outcome.error is error
    (record,) = [record for record in caplog.records if record.name == "rankzero"]
    assert record.levelno == logging.ERROR and str(error) in record.getMessage()


@pytest.mark.parametrize("failing_batch", [0, 1, 3])
def test_failure_in_training_is_reported_before_other_callbacks_are_called(callback, failing_batch):
    """A user's callback may wait for all ranks, as `OnExceptionCheckpoint` does."""

    class FailingModel(BoringModel):
        def training_step(self, batch, batch_idx):
            if batch_idx == failing_batch:
                raise ZeroDivisionError("in the step")
            return super().training_step(batch, batch_idx)

    earlier_reports = []
    recorder = LambdaCallback(on_exception=lambda *_: earlier_reports.extend(callback.control_channel.reported))
    with pytest.raises(ZeroDivisionError) as error:
        train_in_process(callback, recorder, model=FailingModel(), loops=True, max_epochs=1, limit_train_batches=5)
    assert callback.outcome == Outcome(has_trained=failing_batch > 0, error=error.value)
    assert earlier_reports == callback.control_channel.reported and "in the step" in earlier_reports[0]


@pytest.mark.parametrize(
    ("size", "automatic", "flag"),
    [(40, True, "--max_device_batch_size 20, which"), (40, False, "--batch_size 20"), (1, True, None)],
)
def test_a_gpu_without_memory_suggests_half_of_its_batch(callback, size, automatic, flag):
    class LargeModel(BoringModel):
        def training_step(self, batch, batch_idx):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    model = LargeModel()
    model.automatic_optimization = automatic
    data = DataLoader(RandomDataset(32, 80), batch_size=size)
    with pytest.raises(torch.OutOfMemoryError) as error:
        train_in_process(callback, model=model, data=data, plan=SamplingPlan(), max_epochs=1, num_sanity_val_steps=0)
    assert (advice_of(error.value) == "") if flag is None else (f"type {flag}" in advice_of(error.value))
