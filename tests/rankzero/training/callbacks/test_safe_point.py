import functools
import math
import signal
from itertools import cycle
from types import SimpleNamespace

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.demos.boring_classes import BoringModel

from rankzero.checkpoints.checkpoint_io import DirectoryCheckpointIO
from rankzero.checkpoints.manifest import checkpoints_in
from rankzero.distributed.stop_and_failure.channel import ControlChannel
from rankzero.distributed.world import World
from rankzero.messages import SaveError, Stopped
from rankzero.runs.directory import RunDirectory
from rankzero.training.callbacks import safe_point as safe_points
from rankzero.training.callbacks.checkpointing import CheckpointCallback, Interval
from rankzero.training.callbacks.finite_weights import FiniteWeights
from rankzero.training.callbacks.safe_point import REMEMBERED_STEPS, NoSignalConnector, SafePoint, StepKind, TimeBudget
from rankzero.training.hooks import LoopCallback
from running import train_in_process
from stock import SILENT, saves_to


class RequestStop(Callback):
    """Requests a stop in one of Lightning's hooks."""

    def __init__(self, channel, hook, occurrence=0):
        self.channel, self.hook, self.occurrence, self.called_hooks = channel, hook, occurrence, []

    def record(self, hook, trainer, *arguments):
        self.called_hooks.append(hook)
        if (hook, self.called_hooks.count(hook) - 1) == (self.hook, self.occurrence):
            for reason in ("SIGTERM", "SIGUSR1"):
                self.channel.request_stop(reason)


for _hook in ("on_train_batch_start", "on_train_batch_end", "on_validation_end", "on_train_epoch_end"):
    setattr(RequestStop, _hook, functools.partialmethod(RequestStop.record, _hook))


@pytest.fixture
def channel():
    return ControlChannel(World(), None)


@pytest.fixture
def checkpoints(tmp_path):
    return CheckpointCallback(RunDirectory(tmp_path / "x"), Interval(epochs=9), lambda: {"run": "x"})


def train(channel, checkpoints, hook="", occurrence=0, **settings):
    """Trains 2 epochs of 4 batches; returns the hooks that were called, and the reason and step of the stop."""
    request_stop = RequestStop(channel, hook, occurrence)
    safe_point = SafePoint(channel, math.inf, checkpoints, FiniteWeights(channel, stops=False))
    model, reason = BoringModel(), None
    settings = {"limit_train_batches": 4, "max_epochs": 2, "num_sanity_val_steps": 0, **settings}
    settings |= {"plugins": [DirectoryCheckpointIO()], "enable_checkpointing": checkpoints is not None}
    callbacks = [request_stop, *filter(None, [checkpoints])]
    try:
        train_in_process(*callbacks, model=model, loops=True, subscribers=[safe_point], **settings)
    except Stopped as stopped:
        reason = stopped.reason
    return request_stop.called_hooks, (reason, model.trainer.global_step)


def saved_steps(checkpoints):
    return [int(path.name.removeprefix("step-")) for path in checkpoints_in(checkpoints.run.checkpoints)]


@pytest.mark.parametrize(
    ("hook", "occurrence", "micro_batches", "step"),
    [
        *(("on_train_batch_start", 0, 1, 1), ("on_train_batch_start", 3, 1, 4)),
        *(("on_train_epoch_end", 0, 1, 4), ("on_validation_end", 0, 1, 4)),
        *(("on_train_batch_end", 5, 1, 6), ("on_train_batch_end", 0, 3, 1), ("on_train_batch_end", 2, 3, 1)),
        *(("", 0, 1, 8), ("on_train_batch_start", 7, 1, 8), ("on_validation_end", 1, 1, 8)),
    ],
)
def test_run_stops_after_the_current_step_and_saves_it(channel, checkpoints, hook, occurrence, micro_batches, step):
    """The first reason counts. A validation or the end of an epoch that has begun is completed before the stop.

    Without a request before the last step, the run finishes.
    """
    called_hooks, stopped = train(channel, checkpoints, hook, occurrence, accumulate_grad_batches=micro_batches)
    assert stopped == ("SIGTERM" if step < 8 else None, step) and saved_steps(checkpoints) == [step]
    assert called_hooks.count("on_train_batch_end") == step * micro_batches
    assert called_hooks.count("on_validation_end") == called_hooks.count("on_train_epoch_end") == step // 4


def test_stop_request_before_the_first_step_stops_before_training(channel, checkpoints):
    channel.request_stop("SIGINT")
    assert train(channel, checkpoints) == ([], ("SIGINT", 0)) and saved_steps(checkpoints) == [0]


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
    trainer._signal_connector = NoSignalConnector()
    trainer.fit(BoringModel())
    assert during_training == [before] and handlers() == before and not trainer._signal_connector.received_sigterm


SLOW = 3.0


@pytest.fixture
def clock(monkeypatch):
    """A clock that passes only where a test moves it."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(safe_points, "time", clock)
    return clock


class Paused(BoringModel):
    """Takes time in steps, by their number from 0, and in validation."""

    def __init__(self, clock, slow_steps, validation):
        super().__init__()
        self.clock, self.slow_steps, self.validation = clock, slow_steps, validation

    def training_step(self, batch, batch_idx):
        self.clock.now += SLOW if self.trainer.global_step in self.slow_steps else 0.001
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.clock.now += 0.0 if self.trainer.sanity_checking else self.validation
        return super().validation_step(batch, batch_idx)


class Recorder:
    """Stands for the checkpoint callback: records the steps after which it holds a checkpoint."""

    is_due = False

    def __init__(self, clock, pause):
        self.clock, self.pause, self.steps = clock, pause, []
        self.channel = SimpleNamespace(position=-1, stop_reason=None)
        self.subscribers = [SafePoint(self.channel, math.inf, self, None)]

    def hold(self, trainer):
        self.steps.append(trainer.global_step)
        self.clock.now += self.pause

    def write_held(self, *arguments):
        pass

    save_if_due = write_held


SLOW_VALIDATION = {"validation": SLOW, "limit_val_batches": 1}
COPY = 0.02 * SLOW
"""Seconds of a copy that takes two percent of a slow step."""
SLOW_COPY = {"slow_steps": range(16), "pause": 5.5 * COPY}
CASES = {
    "nothing is held without slow steps": ({}, []),
    "nothing is held after one slow step": ({"slow_steps": [0]}, []),
    "before each slow step": ({"slow_steps": range(8)}, [2, 3, 4, 5, 6, 7]),
    "once more after the steps have become fast": ({"slow_steps": range(4)}, [2, 3, 4]),
    "two percent of the time of slow steps": ({**SLOW_COPY, "limit_train_batches": 16}, [2, 8, 14]),
    "two percent of the time of slow epochs": ({**SLOW_COPY, "limit_train_batches": 1, "max_epochs": 16}, [1, 7, 13]),
    "two percent of the time of slow validations": (
        {**SLOW_VALIDATION, "val_check_interval": 2, "pause": 2.5 * COPY, "limit_train_batches": 16},
        [3, 9, 15],
    ),
    "before a slow validation": ({**SLOW_VALIDATION, "val_check_interval": 2}, [3, 5, 7]),
    "before the validation of each epoch": ({**SLOW_VALIDATION, "max_epochs": 4, "limit_train_batches": 3}, [5, 8, 11]),
}


@pytest.mark.parametrize("case", CASES)
def test_checkpoints_are_held_before_slow_steps_and_validations(clock, case):
    settings = {"max_epochs": 1, "limit_train_batches": 8, "limit_val_batches": 0, **CASES[case][0]}
    slow_steps, validation = settings.pop("slow_steps", ()), settings.pop("validation", 0.0)
    recorder = Recorder(clock, settings.pop("pause", 0.0))
    model, subscribers = Paused(clock, slow_steps, validation), recorder.subscribers
    train_in_process(model=model, loops=True, subscribers=subscribers, **settings)
    assert recorder.channel.on_stop == recorder.write_held
    assert recorder.steps == CASES[case][1]


def test_the_time_of_a_copy_on_a_gpu_is_measured_without_the_steps_before_it(clock, monkeypatch):
    waits = cycle([SLOW, SLOW_COPY["pause"]])
    monkeypatch.setattr(safe_points, "synchronize", lambda _: setattr(clock, "now", clock.now + next(waits)))
    recorder, model = Recorder(clock, 0.0), Paused(clock, range(16), 0.0)
    settings = {"max_epochs": 1, "limit_train_batches": 16, "limit_val_batches": 0}
    train_in_process(model=model, loops=True, subscribers=recorder.subscribers, **settings)
    assert recorder.steps == CASES["two percent of the time of slow steps"][1]


class RecordKinds(LoopCallback):
    def __init__(self):
        self.predicted, self.actual, self.validated = [], [], False

    def on_validation_start(self, trainer, module):
        self.validated = not trainer.sanity_checking

    def on_epoch_done(self, trainer):
        self.record(trainer, StepKind.EPOCH)

    def on_step_done(self, trainer):
        if not trainer.fit_loop.epoch_loop.is_complete:
            self.record(trainer, StepKind.PLAIN)

    def record(self, trainer, kind):
        assert trainer.fit_loop.epoch_loop.has_validated == self.validated
        self.actual.append(StepKind.VALIDATION if self.validated else kind)

    def on_safe_point(self, trainer):
        self.validated = False
        self.predicted.append(safe_points.next_steps(trainer))


@pytest.mark.parametrize(
    "settings",
    [
        *({}, {"limit_val_batches": 0}, {"num_sanity_val_steps": 2}, {"check_val_every_n_epoch": 2}),
        *({"val_check_interval": 0.25}, {"val_check_interval": 3}),
        {"val_check_interval": 5, "check_val_every_n_epoch": None},
        {"check_val_every_n_epoch": 3, "val_check_interval": 0.5},
        *({"accumulate_grad_batches": count, "val_check_interval": count + 1} for count in (2, 3)),
        {"accumulate_grad_batches": 20, "check_val_every_n_epoch": 2},
    ],
    ids=str,
)
def test_kinds_of_the_next_two_steps_are_predicted(settings):
    recorder = RecordKinds()
    train_in_process(recorder, loops=True, max_epochs=4, limit_train_batches=8, **settings)
    assert len(recorder.actual) == 4 * math.ceil(8 / settings.get("accumulate_grad_batches", 1))
    assert [next_kind for next_kind, _ in recorder.predicted][: len(recorder.actual)] == recorder.actual
    assert [second_kind for _, second_kind in recorder.predicted][: len(recorder.actual) - 1] == recorder.actual[1:]


def test_validation_of_the_previous_attempt_does_not_count_after_a_resume(tmp_path):
    train_in_process(saves_to(tmp_path / "a.ckpt"), loops=True, max_epochs=2, limit_train_batches=4)
    recorder = RecordKinds()
    train_in_process(recorder, loops=True, max_epochs=3, limit_train_batches=4, resume=tmp_path / "a.ckpt")
    assert recorder.actual == [StepKind.PLAIN, StepKind.PLAIN, StepKind.PLAIN, StepKind.VALIDATION]


PLAIN, EPOCH, VALIDATION = StepKind


def last_second_in_time(time_budget, clock, next_steps):
    """Returns the latest whole second at which the next steps still fit."""
    fits = []
    for clock.now in range(1001):
        fits.append(not time_budget.is_over(next_steps))
    assert fits == sorted(fits, reverse=True), "once over, always over"
    return sum(fits) - 1


@pytest.mark.parametrize(
    ("guess", "noted", "next_steps", "needed"),
    [
        *((0.0, [], [PLAIN], 3), (0.0, [], [PLAIN, PLAIN], 2 * 3), (60.0, [], [VALIDATION], 3 + 60)),
        (0.0, [(100.0, VALIDATION)], [PLAIN, VALIDATION], 3 + 100),
        (0.0, [(100.0, VALIDATION)], [PLAIN, PLAIN], 2 * 3),
        *((60.0, [(7.0, VALIDATION)], [VALIDATION], 7), (60.0, [(5.0, EPOCH)], [EPOCH], 5)),
        (60.0, [(5.0, EPOCH)], [VALIDATION], 5 + 60),  # for example, only every second epoch may have a validation
        (0.0, [(300.0, PLAIN), *[(3.0, PLAIN)] * (REMEMBERED_STEPS - 1)], [PLAIN], 300),  # such as a step that compiles
        (0.0, [(300.0, PLAIN), *[(3.0, PLAIN)] * REMEMBERED_STEPS], [PLAIN], 3),
    ],
)
def test_time_is_over_when_the_next_steps_and_twice_the_longest_save_no_longer_fit(
    guess, noted, next_steps, needed, clock
):
    """The guess is used until a validation is measured; a slow step is forgotten after enough steps."""
    time_budget = TimeBudget(1000.0)
    assert last_second_in_time(time_budget, clock, [PLAIN]) == 1000 - 10 - 5  # reserved for a save that is not measured
    time_budget.longest_save, time_budget.validation_guess = 20.0, guess
    for seconds, kind in [(3.0, PLAIN), *noted]:
        time_budget.steps[kind].append(seconds)
    assert last_second_in_time(time_budget, clock, next_steps) == 1000 - 10 - 2 * 20 - needed
