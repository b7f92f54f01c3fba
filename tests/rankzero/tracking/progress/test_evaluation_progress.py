from math import inf
from types import SimpleNamespace

import pytest
from lightning.pytorch.trainer.states import TrainerFn

from rankzero.tracking.progress.evaluation_progress import (
    EvaluationProgress,
    batches_text,
    evaluation_batches,
    evaluation_label,
)
from running import train_in_process


def trainer_with(function, sanity_checking=False):
    return SimpleNamespace(
        sanity_checking=sanity_checking,
        state=SimpleNamespace(fn=function),
        current_epoch=1,
        max_epochs=3,
        num_sanity_val_batches=[1],
        num_val_batches=[2],
        num_test_batches=[3],
        num_predict_batches=[4],
    )


@pytest.mark.parametrize(
    ("trainer", "label", "batches"),
    [
        (trainer_with(TrainerFn.FITTING, sanity_checking=True), "validation before training", [1]),
        (trainer_with(TrainerFn.FITTING), "epoch 2/3 validation", [2]),
        (trainer_with(TrainerFn.VALIDATING), "validation", [2]),
        (trainer_with(TrainerFn.TESTING), "test", [3]),
        (trainer_with(TrainerFn.PREDICTING), "prediction", [4]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_evaluation_has_a_name_and_its_own_number_of_batches(trainer, label, batches):
    assert (evaluation_label(trainer), evaluation_batches(trainer)) == (label, batches)


def test_the_loader_is_named_if_there_are_several_and_the_total_if_it_is_known():
    assert batches_text(3, [8], 0) == "batch 3/8" and batches_text(3, [inf], 0) == "batch 3"
    assert batches_text(3, [8, 9], 1) == "batch 3/9 of loader 2/2"
    assert batches_text(3, [8, inf], 1) == "batch 3 of loader 2/2"


def test_batches_of_the_validation_before_training_and_within_it_are_shown():
    class Shown(EvaluationProgress):
        def __init__(self):
            self.batches = []

        def show_evaluation(self, trainer, batches, loader):
            self.batches.append((evaluation_label(trainer), batches, loader))

    shown = Shown()
    train_in_process(shown, max_epochs=1, limit_train_batches=1, limit_val_batches=2, num_sanity_val_steps=1)
    assert shown.batches == [
        ("validation before training", 1, 0),
        ("epoch 1/1 validation", 1, 0),
        ("epoch 1/1 validation", 2, 0),
    ]
