from types import SimpleNamespace

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.demos.boring_classes import BoringModel

from rankzero.training.callbacks import held_checkpoint
from rankzero.training.callbacks.held_checkpoint import HeldCheckpoint
from rankzero.training.fit_loop import fit_loop_of
from running import train_in_process

SLOW = 3.0


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
def test_checkpoints_are_held_before_slow_steps_and_validations(monkeypatch, case):
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)  # the time passes only in the model and the recorder
    monkeypatch.setattr(held_checkpoint, "time", clock)
    settings = {"max_epochs": 1, "limit_train_batches": 8, "limit_val_batches": 0, **CASES[case][0]}
    slow_steps, validation = settings.pop("slow_steps", ()), settings.pop("validation", 0.0)
    recorder = Recorder(clock, settings.pop("pause", 0.0))
    train_in_process(recorder, model=Paused(clock, slow_steps, validation), loops=True, **settings)
    assert recorder.channel.on_stop == recorder.write_held
    assert recorder.steps == CASES[case][1]
