import math
from types import SimpleNamespace

import pytest

from rankzero.training.callbacks import time_limit
from rankzero.training.callbacks.time_limit import REMEMBERED_STEPS, StepKind, WallTime, next_steps
from rankzero.training.hooks import LoopCallback
from running import train_in_process
from stock import saves_to


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
        self.predicted.append(next_steps(trainer))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"limit_val_batches": 0},
        {"val_check_interval": 0.25},
        {"val_check_interval": 3},
        {"val_check_interval": 5, "check_val_every_n_epoch": None},
        {"check_val_every_n_epoch": 2},
        {"check_val_every_n_epoch": 3, "val_check_interval": 0.5},
        {"accumulate_grad_batches": 2, "val_check_interval": 3},
        {"accumulate_grad_batches": 3, "val_check_interval": 4},
        {"accumulate_grad_batches": 20, "check_val_every_n_epoch": 2},
        {"num_sanity_val_steps": 2},
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


def last_second_in_time(wall_time, clock, next_steps):
    """Returns the latest whole second at which the next steps still fit."""
    fits = []
    for clock.now in range(1001):
        fits.append(not wall_time.is_over(next_steps))
    assert fits == sorted(fits, reverse=True), "once over, always over"
    return sum(fits) - 1


@pytest.mark.parametrize(
    ("guess", "noted", "next_steps", "needed"),
    [
        (0.0, [], [PLAIN], 3),
        (0.0, [], [PLAIN, PLAIN], 2 * 3),
        (0.0, [(100.0, VALIDATION)], [PLAIN, VALIDATION], 3 + 100),
        (0.0, [(100.0, VALIDATION)], [PLAIN, PLAIN], 2 * 3),
        (60.0, [], [VALIDATION], 3 + 60),
        (60.0, [(7.0, VALIDATION)], [VALIDATION], 7),
        (60.0, [(5.0, EPOCH)], [EPOCH], 5),
        (60.0, [(5.0, EPOCH)], [VALIDATION], 5 + 60),  # for example, only every second epoch may have a validation
        (0.0, [(300.0, PLAIN), *[(3.0, PLAIN)] * (REMEMBERED_STEPS - 1)], [PLAIN], 300),  # such as a step that compiles
        (0.0, [(300.0, PLAIN), *[(3.0, PLAIN)] * REMEMBERED_STEPS], [PLAIN], 3),
    ],
)
def test_time_is_over_when_the_next_steps_and_twice_the_longest_save_no_longer_fit(
    guess, noted, next_steps, needed, monkeypatch
):
    """The guess is used until a validation is measured; a slow step is forgotten after enough steps."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(time_limit, "time", clock)
    wall_time = WallTime(1000.0)
    assert last_second_in_time(wall_time, clock, [PLAIN]) == 1000 - 10 - 5  # reserved for a save before any measurement
    for seconds in (2.0, 20.0, 1.0):
        wall_time.note_save(seconds)
    wall_time.validation_guess = guess
    for seconds, kind in [(3.0, PLAIN), *noted]:
        wall_time.steps[kind].append(seconds)
    assert last_second_in_time(wall_time, clock, next_steps) == 1000 - 10 - 2 * 20 - needed
