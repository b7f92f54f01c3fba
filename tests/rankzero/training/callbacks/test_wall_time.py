import pytest

from rankzero.training.callbacks.wall_time import REMEMBERED_STEPS, StepKind, WallTime

PLAIN, EPOCH, VALIDATION = StepKind


class Clock:
    """Clock whose time, in seconds, is set by the test."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def wall_time(clock):
    """Limit of 1000 s with a margin of 10 s, after a save of 20 s and a step of 3 s."""
    wall_time = WallTime(1000.0, margin_seconds=10.0, clock=clock)
    wall_time.note_save(20.0)
    wall_time.note_step(3.0, PLAIN)
    return wall_time


def last_second_in_time(wall_time, clock, next_steps):
    """Returns the latest whole second at which the next steps still fit."""
    times = range(1001)
    fits = []
    for clock.now in times:
        fits.append(not wall_time.is_over(next_steps))
    assert fits == sorted(fits, reverse=True), "once over, always over"
    return sum(fits) - 1


def test_time_is_over_when_the_next_steps_and_a_slow_save_no_longer_fit(wall_time, clock):
    assert last_second_in_time(wall_time, clock, [PLAIN]) == 1000 - 10 - 2 * 20 - 3
    assert last_second_in_time(wall_time, clock, [PLAIN, PLAIN]) == 1000 - 10 - 2 * 20 - 2 * 3


def test_validation_counts_only_if_it_is_among_the_next_steps(wall_time, clock):
    wall_time.note_step(100.0, VALIDATION)
    assert last_second_in_time(wall_time, clock, [PLAIN, VALIDATION]) == 1000 - 10 - 2 * 20 - 3 - 100
    assert last_second_in_time(wall_time, clock, [PLAIN, PLAIN]) == 1000 - 10 - 2 * 20 - 2 * 3


def test_guess_is_used_until_a_validation_is_measured(wall_time, clock):
    wall_time.validation_guess = 60.0
    assert last_second_in_time(wall_time, clock, [VALIDATION]) == 1000 - 10 - 2 * 20 - 3 - 60
    wall_time.note_step(7.0, VALIDATION)
    assert last_second_in_time(wall_time, clock, [VALIDATION]) == 1000 - 10 - 2 * 20 - 7


def test_epoch_end_does_not_replace_the_validation_guess(wall_time, clock):
    """For example, only every second epoch may have a validation."""
    wall_time.validation_guess = 60.0
    wall_time.note_step(5.0, EPOCH)
    assert last_second_in_time(wall_time, clock, [EPOCH]) == 1000 - 10 - 2 * 20 - 5
    assert last_second_in_time(wall_time, clock, [VALIDATION]) == 1000 - 10 - 2 * 20 - 5 - 60


def test_time_for_a_save_is_reserved_before_any_measurement(clock):
    assert last_second_in_time(WallTime(1000.0, margin_seconds=10.0, clock=clock), clock, [PLAIN]) == 1000 - 10 - 5


@pytest.mark.parametrize(
    ("saves", "expected"), [([0.5], 1.0), ([2.0, 9.0, 1.0], 18.0), ([2.5], 5.0), ([2.5, 1.0], 5.0)]
)
def test_save_estimate_is_twice_the_longest_save(clock, saves, expected):
    wall_time = WallTime(1000.0, clock=clock)
    for seconds in saves:
        wall_time.note_save(seconds)
    assert wall_time.save_seconds == expected


def test_slow_step_is_forgotten_after_enough_steps(wall_time, clock):
    wall_time.note_step(300.0, PLAIN)  # for example the first step, which compiles
    for _ in range(REMEMBERED_STEPS - 1):
        wall_time.note_step(3.0, PLAIN)
    assert last_second_in_time(wall_time, clock, [PLAIN]) == 1000 - 10 - 2 * 20 - 300
    wall_time.note_step(3.0, PLAIN)
    assert last_second_in_time(wall_time, clock, [PLAIN]) == 1000 - 10 - 2 * 20 - 3


def test_seconds_left_is_the_time_until_the_limit(wall_time, clock):
    clock.now = 990.0
    assert wall_time.seconds_left == 10.0 and wall_time.is_over([])
