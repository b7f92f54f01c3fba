import io
import re
from math import inf
from types import SimpleNamespace

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.trainer.states import TrainerFn
from rich import reconfigure

from rankzero.tracking.progress.bar import BarProgress
from rankzero.tracking.progress.evaluation_progress import batches_text, evaluation_batches, evaluation_label
from rankzero.tracking.progress.plain_lines import PlainProgress
from stock import SILENT


@pytest.mark.parametrize(
    ("function", "is_check", "label", "batches"),
    [
        (TrainerFn.FITTING, True, "validation before training", [1]),
        (TrainerFn.FITTING, False, "epoch 2/3 validation", [2]),
        (TrainerFn.VALIDATING, False, "validation", [2]),
        (TrainerFn.TESTING, False, "test", [3]),
        (TrainerFn.PREDICTING, False, "prediction", [4]),
    ],
)
def test_each_evaluation_has_a_name_and_its_own_number_of_batches(function, is_check, label, batches):
    numbers = {f"num_{name}_batches": [n] for n, name in enumerate(("sanity_val", "val", "test", "predict"), start=1)}
    state = SimpleNamespace(fn=function)
    trainer = SimpleNamespace(sanity_checking=is_check, state=state, current_epoch=1, max_epochs=3, **numbers)
    assert (evaluation_label(trainer), evaluation_batches(trainer)) == (label, batches)


def test_the_loader_is_named_if_there_are_several_and_the_total_if_it_is_known():
    assert batches_text(3, [8], 0) == "batch 3/8" and batches_text(3, [inf], 0) == "batch 3"
    assert batches_text(3, [8, 9], 1) == "batch 3/9 of loader 2/2"
    assert batches_text(3, [8, inf], 1) == "batch 3 of loader 2/2"


@pytest.mark.parametrize(
    ("method", "limit", "name"),
    [("validate", "val", "validation"), ("test", "test", "test"), ("predict", "predict", "prediction")],
)
def test_an_evaluation_ends_with_a_full_bar_or_prints_a_line_for_each_batch(method, limit, name, capsys):
    def evaluate(callback):
        settings = {**SILENT, "enable_progress_bar": True, f"limit_{limit}_batches": 2}
        getattr(Trainer(callbacks=[callback], **settings), method)(BoringModel())

    stream = io.StringIO()
    evaluate(BarProgress(console_kwargs={"width": 80, "force_terminal": True, "file": stream}))
    reconfigure()
    assert re.search(rf"{name}  ━+  batch 2/2", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()))
    capsys.readouterr()
    evaluate(PlainProgress(interval_seconds=0, clock=lambda: 0.0))
    lines = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines() if " batch " in line]
    assert lines == [f"{name} batch 1/2", f"{name} batch 2/2"]
