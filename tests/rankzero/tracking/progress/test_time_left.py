"""Time left of simulated runs, compared with the time that the rest of the run really takes."""

from dataclasses import dataclass, replace
from math import inf

import pytest

from rankzero.tracking.progress.time_left import Limits, Pace, Position


@dataclass
class Simulation:
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
                (pace.end_batches if batch == batches else pace.record)(position)
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
    "epochs": Simulation(LIMITS),
    "fast batches": Simulation(replace(LIMITS, epochs=30), lambda epoch: 100, batch_seconds=0.001),
    "slow batches": Simulation(LIMITS, batch_seconds=600.0),
    "one batch per epoch": Simulation(LIMITS, lambda epoch: 1),
    "ends of epochs": Simulation(LIMITS, end_seconds=7.0),
    "validations": Simulation(VALIDATES, validation_seconds=30.0, end_seconds=3.0),
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
    run = Simulation(replace(VALIDATES, epochs=2, validation_batches=4))
    assert run.run()[4][1] == pytest.approx(15 + 2 * 4)


def test_longer_epochs_change_the_estimate():
    run = Simulation(LIMITS, lambda epoch: 10 if epoch < 2 else 100)
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
