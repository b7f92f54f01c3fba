from types import SimpleNamespace

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.demos.boring_classes import BoringModel

from rankzero.training.callbacks import held_checkpoint
from rankzero.training.callbacks.held_checkpoint import HeldCheckpoint
from rankzero.training.fit_loop import fit_loop_of
from running import train_in_process

SLOW = 3.0


class Clock:
    """Stands for the module `time`; the time passes only where a test says so."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


class Paused(BoringModel):
    """Takes time in steps, by their number from 0, and in validation."""

    def __init__(self, clock, slow_steps, validation):
        super().__init__()
        self.clock, self.slow_steps, self.validation = clock, slow_steps, validation

    def training_step(self, batch, batch_idx):
        self.clock.now += SLOW if self.trainer.global_step in self.slow_steps else 0.0
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.clock.now += 0.0 if self.trainer.sanity_checking else self.validation
        return super().validation_step(batch, batch_idx)


class Recorder(Callback):
    """Stands for the checkpoint callback: records the steps after which it holds a checkpoint."""

    def __init__(self, clock, pause):
        self.clock, self.pause, self.steps, self.channel = clock, pause, [], SimpleNamespace()

    def setup(self, trainer, pl_module, stage):
        fit_loop_of(trainer).extra_subscribers.append(HeldCheckpoint(self.channel, self))

    def hold(self, trainer):
        self.steps.append(trainer.global_step)
        self.clock.now += self.pause

    def write_held(self):
        pass


@pytest.fixture
def held_steps(monkeypatch):
    """Returns a function that trains, and returns the steps after which a checkpoint was held."""
    monkeypatch.setattr(held_checkpoint, "time", clock := Clock())

    def train(slow_steps=(), validation=0.0, pause=0.0, **settings):
        recorder, model = Recorder(clock, pause), Paused(clock, slow_steps, validation)
        settings = {"max_epochs": 1, "limit_train_batches": 8, "limit_val_batches": 0, **settings}
        train_in_process(recorder, model=model, loops=True, **settings)
        assert recorder.channel.on_stop == recorder.write_held
        return recorder.steps

    return train


def test_without_slow_steps_nothing_is_held(held_steps):
    assert held_steps() == [] and held_steps([0]) == []


def test_a_checkpoint_is_held_before_each_slow_step(held_steps):
    assert held_steps(range(8)) == [2, 3, 4, 5, 6, 7]


def test_one_more_checkpoint_is_held_after_the_steps_have_become_fast(held_steps):
    assert held_steps(range(4)) == [2, 3, 4]


def test_the_copies_take_two_percent_of_the_time(held_steps):
    pause = 0.02 * SLOW * 5.5
    assert held_steps(range(16), pause=pause, limit_train_batches=16) == [2, 8, 14]


def test_the_copies_take_two_percent_of_the_time_with_epochs_of_one_step(held_steps):
    pause = 0.02 * SLOW * 5.5
    assert held_steps(range(16), pause=pause, limit_train_batches=1, max_epochs=16) == [1, 7, 13]


def test_the_copies_take_two_percent_of_the_time_of_slow_validations(held_steps):
    validations = {"validation": SLOW, "val_check_interval": 2, "limit_val_batches": 1}
    assert held_steps(**validations, pause=0.02 * SLOW * 2.5, limit_train_batches=16) == [3, 9, 15]


def test_a_checkpoint_is_held_before_a_slow_validation(held_steps):
    assert held_steps(validation=SLOW, val_check_interval=2, limit_val_batches=1) == [3, 5, 7]


def test_a_checkpoint_is_held_before_the_validation_of_each_epoch(held_steps):
    steps = held_steps(validation=SLOW, limit_val_batches=1, max_epochs=4, limit_train_batches=3)
    assert steps == [5, 8, 11]
