import math

import pytest

from rankzero.runs.reports.comparison import panels as module
from rankzero.runs.reports.comparison.compared_run import ComparedRun
from rankzero.runs.reports.comparison.panels import MAX_PANELS, MAX_POINTS, TRAIN_LOSS, chosen_metrics, means, panels
from rankzero.runs.reports.recorded.recorded_run import RecordedRun
from rankzero.runs.reports.recorded.run_status import Status
from rankzero.runs.tensorboard.curve import Curve


def run(tmp_path, label="a", kept_best=None, **tags):
    curves = {
        tag.replace("__", "/"): Curve(list(range(len(values))), [0.0] * len(values), list(values))
        for tag, values in tags.items()
    }
    return ComparedRun(label, RecordedRun(tmp_path / label, kept_best=kept_best), Status("finished"), {}, curves)


def test_train_loss_and_validation_metrics_are_drawn_that_of_keep_best_first_then_common_ones(tmp_path):
    first = run(tmp_path, train__loss=[1], val__loss=[1], val__accuracy=[1], val_f1=[1], x_axis__samples=[1])
    second = run(tmp_path, train__loss=[1], val__loss=[1], val__accuracy=[1], train__lr=[1], learning=[1])
    assert chosen_metrics([first, second]) == ([TRAIN_LOSS, "val/accuracy", "val/loss", "val_f1"], [])
    kept = run(tmp_path, kept_best=("min", "val/loss"), val__loss=[1], val__accuracy=[1])
    assert chosen_metrics([kept])[0] == ["val/loss", "val/accuracy"]
    assert chosen_metrics([run(tmp_path, reward=[1], x_axis__epoch=[1])])[0] == ["reward"]
    assert chosen_metrics([run(tmp_path)]) == ([], [])
    many = run(tmp_path, train__loss=[1], **{f"val__m{number}": [1] for number in range(MAX_PANELS)})
    assert chosen_metrics([many])[1] == [f"val/m{MAX_PANELS - 1}"]


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        (["train/mean_loss", "train/loss"], "train/mean_loss"),
        (["loss", "train/loss"], "train/loss"),
        (["train_loss_epoch", "train_loss", "val_loss"], "train_loss"),
        (["val_loss", "test/loss", "accuracy"], None),
    ],
)
def test_the_loss_over_all_ranks_is_preferred(tags, expected):
    assert module.loss_tag(dict.fromkeys(tags, Curve())) == expected


def test_missing_and_not_finite_curves_and_axes_are_drawn_as_far_as_possible_and_noted(tmp_path):
    whole, broken = run(tmp_path, "a", val__loss=[1, 2]), run(tmp_path, "b", val__loss=[1, math.nan], val__acc=[1])
    drawn, notes = panels([whole, broken, run(tmp_path, "empty")], ["val/loss", "val/acc"], "steps")
    assert [[line.number for line in panel.lines] for panel in drawn] == [[0, 1], [1]]
    assert notes == ["b: 1 of 2 values of val/loss are not finite", "a: has no curve of val/acc"]
    new, old = run(tmp_path, "new", loss=[1], x_axis__samples=[32]), run(tmp_path, "old", loss=[1])
    drawn, notes = panels([new, old], [TRAIN_LOSS], "samples")
    assert [line.number for line in drawn[0].lines] == [0]
    assert notes == ["old: it has not logged its samples by step, so it is not drawn; --x steps draws it"]


def test_long_curves_are_drawn_as_means_of_successive_finite_values(tmp_path):
    (panel,), _ = panels([run(tmp_path, loss=[1.0, 3.0] * MAX_POINTS)], [TRAIN_LOSS], "steps")
    assert panel.averaged == 2 and panel.lines[0].y == [2.0] * MAX_POINTS
    assert panel.lines[0].x[:2] == [0.5, 2.5]
    assert means([1, math.nan, 3, math.inf, 5], 3) == [1.0, 4.0]
    assert math.isnan(means([math.nan], 2)[0]) and means([], 2) == []
