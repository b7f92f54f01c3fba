import pytest

from rankzero.runs.reports.metric_choice import direction, is_measurement, is_training_loss, is_validation, main_metric
from rankzero.tracking.measurements.series import SERIES


@pytest.mark.parametrize(
    ("names", "kept_best", "expected"),
    [
        (["train/loss", "val/loss", "val/accuracy"], None, "val/accuracy"),
        (["train/loss", "val/loss", "val/accuracy"], ("min", "val/loss"), "val/loss"),
        (["train/loss", "val/loss"], ("max", "missing"), "val/loss"),
        (["val_loss", "val_acc"], None, "val_acc"),
        (["valLoss", "train_acc"], None, "valLoss"),
        (["validation_mae", "validation_loss"], None, "validation_loss"),
        (["train/loss", "x_axis/samples"], None, "train/loss"),
        (["value", "interval"], None, "value"),
        ([], None, None),
    ],
)
def test_the_metric_that_matters_most(names, kept_best, expected):
    assert main_metric(names, kept_best) == expected


def test_kinds_and_directions_of_metrics_are_recognized_by_whole_words_and_rankzeros_own_series():
    names = {"val/acc": "max", "val_top1": "max", "loss": "min", "perplexity": "min", "temperature": None}
    assert {name: direction(name) for name in names} == names
    assert {direction(name, ("max", name)) for name in names} == {"max"}
    assert is_validation("val/loss") and is_validation("ValAccuracy") and not is_validation("interval/value")
    assert is_training_loss("train_loss") and is_training_loss("loss") and not is_training_loss("val_loss")
    assert {tag for tag in SERIES if "/" in tag and not is_measurement(tag)} == {"train/loss"}
    assert is_measurement("epoch") and is_measurement("train/lr-1") and not is_measurement("worldly/metric")
