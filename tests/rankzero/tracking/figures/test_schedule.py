from types import SimpleNamespace

import pytest
from lightning.pytorch import Callback

from rankzero.tracking.figures.schedule import DrawingSchedule, is_last_validation
from running import train_in_process


def test_first_and_last_validations_are_drawn_and_others_if_drawing_takes_one_percent():
    clock = SimpleNamespace(now=1000.0)
    schedule = DrawingSchedule(lambda: clock.now)
    assert schedule.is_due(is_last=False)
    schedule.record(2.0)
    for now, is_due in ((1001, False), (1199, False), (1200, True)):
        clock.now = now
        assert schedule.is_due(is_last=False) == is_due and schedule.is_due(is_last=True)


class Validations(Callback):
    """Records which validations are the last one."""

    def __init__(self):
        self.seen = []

    def on_validation_start(self, trainer, pl_module):
        self.seen.append(is_last_validation(trainer))


@pytest.mark.parametrize(
    ("settings", "count"),
    [
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
def test_exactly_the_last_validation_is_known_to_be_the_last(settings, count):
    validations = Validations()
    train_in_process(validations, loops=True, num_sanity_val_steps=0, limit_train_batches=10, **settings)
    assert validations.seen == [False] * (count - 1) + [True]
