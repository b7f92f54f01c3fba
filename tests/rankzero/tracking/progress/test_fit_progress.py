"""Figures of real fits, with a simulated clock."""

from dataclasses import dataclass, replace
from math import inf, isfinite
from types import SimpleNamespace

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, Timer

from rankzero.sampling.plan import SamplingPlan
from rankzero.tracking.measurements.throughput import Throughput
from rankzero.tracking.progress.fit_progress import FitProgress
from rankzero.tracking.progress.time_left import Limits, Pace, Position
from rankzero.training.callbacks.time_limit import TimeLimit
from rankzero.training.hooks import LoopCallback
from running import train_in_process

pytestmark = pytest.mark.usefixtures("tick_after_every_batch")


class Simulation(LoopCallback):
    """Advances a clock by 2 s in each batch and 5 s in each validation, and records the time left after each batch."""

    def __init__(self):
        self.now, self.progress, self.estimates, self.epoch_ends, self.epoch_starts = 0.0, None, [], [], []
        self.validated_after = []

    def on_train_start(self, trainer, pl_module):
        self.progress = FitProgress(trainer, lambda: self.now)

    def on_train_epoch_start(self, trainer, pl_module):
        self.progress.begin_epoch()
        self.epoch_starts.append(self.progress.seconds_left)

    def on_train_epoch_end(self, trainer, pl_module):
        self.epoch_ends.append(self.progress.seconds_left)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.now += 2

    def on_tick(self, trainer, batch, batch_idx):
        self.progress.tick()
        self.estimates.append((self.now, self.progress.seconds_left))

    def on_validation_start(self, trainer, pl_module):
        if self.progress is not None:
            self.progress.begin_validation()
            self.now += 5

    def on_validation_end(self, trainer, pl_module):
        if self.progress is not None:
            self.progress.end_validation()
            self.validated_after.append(len(self.estimates))

    @property
    def errors(self):
        """The differences between the stated and the actual time left, once a batch and a validation were measured."""
        assert self.estimates[0][1] is None, "the first batch is not measured"
        first = self.validated_after[0] if self.validated_after else 1
        return [at + estimate - self.now for at, estimate in self.estimates[first:]]


def simulate(*callbacks, simulation=None, **options):
    simulation = simulation or Simulation()
    settings = {"max_epochs": 4, "limit_train_batches": 10, "num_sanity_val_steps": 0, "loops": True, **options}
    train_in_process(simulation, *callbacks, **settings)
    return simulation


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"limit_train_batches": 0.25}, {"limit_val_batches": 0}, {"accumulate_grad_batches": 2}),
        *({"max_steps": 23, "max_epochs": -1}, {"max_steps": 23}, {"max_steps": 1000}),
        *({"max_steps": 11, "max_epochs": -1, "accumulate_grad_batches": 2}, {"val_check_interval": 4}),
        *({"val_check_interval": 5}, {"val_check_interval": 7, "check_val_every_n_epoch": None}),
        *({"check_val_every_n_epoch": 2}, {"check_val_every_n_epoch": 2, "max_epochs": 5}),
    ],
    ids=str,
)
def test_time_left_is_exact_once_a_validation_was_measured(options):
    errors = simulate(**options).errors
    assert len(errors) >= 10 and errors == pytest.approx([0] * len(errors), abs=0.01)


def test_time_left_is_the_same_at_the_end_of_an_epoch_and_at_the_start_of_the_next():
    simulation = simulate()  # between two batches, no time passes but a validation
    assert simulation.epoch_starts[0] is None and simulation.epoch_starts[1:] == simulation.epoch_ends[:-1]
    assert simulation.epoch_starts[1:] == pytest.approx([3 * 25, 2 * 25, 25])


@pytest.mark.parametrize("step", [5, 12, 18])
def test_time_left_of_a_run_resumed_in_mid_epoch_is_exact(tmp_path, step):
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=step, save_top_k=-1, filename="{step}")
    simulate(checkpoint, max_epochs=2, enable_checkpointing=True)
    resumed = simulate(resume=tmp_path / f"step={step}.ckpt")
    assert len(resumed.estimates) == 40 - step
    assert len(resumed.errors) >= 20 and resumed.errors == pytest.approx([0] * len(resumed.errors), abs=0.01)


def test_limits_of_the_trainer_are_read_and_the_time_limit_of_the_job_includes_the_last_save(monkeypatch):
    def limits_with(*callbacks, end=None):
        class Limited(Simulation):
            def on_fit_start(self, trainer, pl_module):
                limits = [TimeLimit(SimpleNamespace(), end, None)] if end else []
                trainer.fit_loop.extra_subscribers.extend(limits)

            def on_train_start(self, trainer, pl_module):
                super().on_train_start(trainer, pl_module)
                self.limits = self.progress._limits
                trainer.fit_loop.extra_subscribers.clear()

        settings = {"max_epochs": 3, "limit_train_batches": 8, "limit_val_batches": 3}
        return simulate(*callbacks, simulation=Limited(), **settings).limits

    limits = limits_with()
    assert (limits.epochs, limits.steps, limits.epoch_batches, limits.validation_batches) == (3, inf, 8, 3)
    assert limits.validates and not isfinite(limits.seconds)
    assert 7100 < limits_with(Timer(duration={"hours": 2})).seconds <= 7200
    monkeypatch.setattr("rankzero.training.callbacks.time_limit.time", SimpleNamespace(monotonic=lambda: 100.0))
    assert limits_with(end=1000.0).seconds == 900 - 10 - 5


def test_training_speed_counts_all_batches_and_no_validation(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("rankzero.tracking.measurements.throughput.time.perf_counter", lambda: now[0])

    class Seconds(Callback):
        def on_train_batch_start(self, *arguments):
            now[0] += 2

        def on_validation_batch_start(self, *arguments):
            now[0] += 50

    throughput = Throughput(SamplingPlan())
    progress = simulate(throughput, Seconds(), max_epochs=2, limit_train_batches=4, num_sanity_val_steps=2).progress
    assert (throughput.samples, throughput.seconds) == (8, 16)  # the loader has a batch size of one
    assert progress.samples_per_second == throughput.samples_per_second == pytest.approx(0.5)


def test_pauses_for_drawing_do_not_change_the_time_left():
    def estimates(pause):
        simulation, throughput = Simulation(), Throughput(SamplingPlan())

        class Drawing(Callback):
            def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
                simulation.now += pause
                throughput.paused_seconds += pause

        simulate(throughput, Drawing(), simulation=simulation, max_epochs=2, limit_train_batches=4)
        return [seconds for _, seconds in simulation.estimates]

    assert estimates(pause=100.0) == estimates(pause=0.0) != []


@dataclass
class SteadyRun:
    """A run whose clock advances by fixed durations, with a validation at the end of each epoch."""

    limits: Limits
    batches_of: object = lambda epoch: 10
    batch_seconds: float = 1.0  # the first batch takes 100 times as long
    validation_seconds: float = 0.0
    end_seconds: float = 0.0

    def run(self):
        """Returns a list of (seconds that the run really needed, time left that was stated) after each batch."""
        self.now, estimates, total = 0.0, [], 0
        pace = Pace(Position(0, 0, 0, 0, has_validated=False), lambda: self.now)
        for epoch in range(int(self.limits.epochs)):
            batches = self.batches_of(epoch)
            limits = replace(self.limits, epoch_batches=batches)
            if epoch > 0:
                pace.begin_epoch()
            for batch in range(1, batches + 1):
                self.now += self.batch_seconds * (1 if total else 100)
                total += 1
                position = Position(epoch, batch, total, total, has_validated=False)
                pace.record(position, is_last_batch=batch == batches)
                estimates.append((self.now, pace.seconds_left(position, limits)))
            if limits.validates:
                pace.begin_validation(position)
                self.now += self.validation_seconds
                pace.end_validation()
            self.now += self.end_seconds
        return [(self.now - at, estimate) for at, estimate in estimates]


LIMITS = Limits(epochs=5, epoch_batches=10)
VALIDATES = replace(LIMITS, validates=True)

RUNS = {
    "epochs": SteadyRun(LIMITS),
    "fast batches": SteadyRun(replace(LIMITS, epochs=30), lambda epoch: 100, batch_seconds=0.001),
    "slow batches": SteadyRun(LIMITS, batch_seconds=600.0),
    "one batch per epoch": SteadyRun(LIMITS, lambda epoch: 1),
    "ends of epochs": SteadyRun(LIMITS, end_seconds=7.0),
    "validations": SteadyRun(VALIDATES, validation_seconds=30.0, end_seconds=3.0),
}


@pytest.mark.parametrize("name", RUNS)
def test_time_left_of_a_steady_run_is_exact_after_the_first_epoch(name):
    run = RUNS[name]
    estimates = run.run()[2 * run.batches_of(0) :]
    if name == "fast batches":
        estimates = estimates[1000:]  # less than a second was measured before
    assert estimates
    for actual, estimate in estimates:
        assert estimate == pytest.approx(actual, rel=0.01, abs=run.batch_seconds * 1.01)


def test_the_slow_first_batch_is_not_extrapolated_and_no_time_is_stated_before_a_second_was_measured():
    (_, first), (_, second), *_ = RUNS["epochs"].run()
    assert first is None and second == pytest.approx(48)
    estimates = RUNS["fast batches"].run()
    assert [estimate for _, estimate in estimates[:900]] == [None] * 900
    assert estimates[1002][1] is not None


def test_the_first_validation_is_estimated_by_its_number_of_batches():
    run = SteadyRun(replace(VALIDATES, epochs=2, validation_batches=4))
    assert run.run()[4][1] == pytest.approx(15 + 2 * 4)


def test_longer_epochs_change_the_estimate():
    run = SteadyRun(LIMITS, lambda epoch: 10 if epoch < 2 else 100)
    estimates = run.run()
    assert estimates[19] == (300, 30) and estimates[20] == (299, 299)


def test_a_slower_run_is_noticed():
    now = [0.0]
    pace, limits = Pace(Position(0, 0, 0, 0), lambda: now[0]), Limits(epochs=1, epoch_batches=100_000)
    for batch in range(1, 4001):
        now[0] += 1.0 if batch < 1000 else 4.0
        pace.record(Position(0, batch, batch, batch))
    estimate = pace.seconds_left(Position(0, 4000, 4000, 4000), limits)
    assert estimate == pytest.approx(96_000 * 4, rel=0.01)


def simulated_pace(validation_seconds=0.0):
    """Returns the pace after 60 batches of a second and one validation, and its clock."""
    now = [0.0]
    pace = Pace(Position(0, 0, 0, 0), lambda: now[0])
    for batch in range(1, 61):
        now[0] += 1.0
        pace.record(Position(0, batch, batch, batch))
        if batch == 50:
            pace.begin_validation(Position(0, batch, batch, batch))
            now[0] += validation_seconds
            pace.end_validation()
    return pace, now


AFTER_60 = Position(0, 60, 60, 60)


def test_validations_at_intervals_of_time_continue_at_the_measured_rate():
    limits = Limits(epochs=3, epoch_batches=100, validates=True, validation_interval=None)
    pace, _ = simulated_pace(validation_seconds=30.0)  # one validation in 60 batches, of which 59 were measured
    assert pace.seconds_left(AFTER_60, limits) == pytest.approx(240 + 240 * 30 / 59)


def test_time_left_decreases_during_a_validation():
    pace, now = simulated_pace(validation_seconds=40.0)
    pace.begin_validation(AFTER_60)
    now[0] += 30.0
    before = pace.seconds_left(AFTER_60, replace(VALIDATES, epoch_batches=100))
    now[0] += 5.0
    assert before - pace.seconds_left(AFTER_60, replace(VALIDATES, epoch_batches=100)) == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("limits", "seconds"),
    [
        ({"epochs": 10}, 940),
        ({"epochs": 10, "steps": 100}, 40),
        ({"epochs": 10, "seconds": 30.0}, 30),
        ({"epochs": 10, "seconds": 3000.0}, 940),
        ({"epochs": 10, "seconds": -3.0}, 0),
        ({}, None),
        ({"seconds": 30.0}, 30),
        ({"epochs": 3, "epoch_batches": inf}, None),
        ({"steps": 80, "epoch_batches": inf}, 20),
    ],
    ids=str,
)
def test_the_limit_that_comes_first_counts_and_an_unlimited_run_has_no_time_left(limits, seconds):
    pace, _ = simulated_pace()
    left = pace.seconds_left(AFTER_60, Limits(**{"epoch_batches": 100, **limits}))
    assert left == (None if seconds is None else pytest.approx(seconds))
