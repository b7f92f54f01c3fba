from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from rankzero.tracking.figures.schedule import DrawingSchedule, is_last_validation
from running import train_in_process
from stock import Unsized


def test_first_and_last_validations_are_drawn_and_others_if_drawing_takes_one_percent():
    clock = SimpleNamespace(now=1000.0)
    schedule = DrawingSchedule(lambda: clock.now)
    assert schedule.is_due(is_last=False)
    schedule.record(2.0)
    for now, is_due in ((1001, False), (1199, False), (1200, True)):
        clock.now = now
        assert schedule.is_due(is_last=False) == is_due and schedule.is_due(is_last=True)


def fit(*callbacks, **settings):
    """Trains, and returns for each validation whether it is known to be the last one."""
    seen = []

    class Validations(Callback):
        def on_validation_start(self, trainer, pl_module):
            seen.append(is_last_validation(trainer))

    train_in_process(*callbacks, Validations(), loops=True, num_sanity_val_steps=0, **settings)
    return seen


def test_a_requested_stop_that_min_epochs_prevents_makes_no_validation_the_last():
    class StopEarly(Callback):
        def on_train_epoch_start(self, trainer, module):
            trainer.should_stop = True

    assert fit(StopEarly(), limit_train_batches=2, min_epochs=3, max_epochs=5) == [False] * 3


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({"data": "stream", "max_epochs": 3}, 3),
        ({"data": "stream", "max_epochs": 3, "max_steps": 8}, 2),
        ({"data": "stream", "max_epochs": 2, "val_check_interval": 2}, 4),
        ({"data": "stream", "max_steps": 10_000, "max_epochs": 3}, 3),
        ({"max_epochs": 3}, 3),
        ({"max_epochs": 5, "check_val_every_n_epoch": 2}, 2),
        ({"max_epochs": 2, "val_check_interval": 3}, 6),
        ({"max_epochs": 2, "val_check_interval": 4}, 4),
        ({"max_epochs": 3, "val_check_interval": 7, "check_val_every_n_epoch": None}, 4),
        ({"max_steps": 20}, 2),
        ({"max_steps": 25, "val_check_interval": 5}, 5),
        ({"max_epochs": 2, "accumulate_grad_batches": 2, "val_check_interval": 5}, 4),
    ],
)
def test_exactly_the_last_validation_is_known_to_be_the_last_also_without_a_length(settings, count):
    if "data" in settings:
        settings = {
            **settings,
            "data": DataLoader(Unsized(torch.rand(4, 32))),
            "limit_train_batches": 1.0,
        }  # four batches, no length
    assert fit(**{"limit_train_batches": 10, **settings}) == [False] * (count - 1) + [True]
