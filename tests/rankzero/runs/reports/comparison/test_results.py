import math

import pytest

from rankzero.runs.reports.comparison.compared_run import ComparedRun
from rankzero.runs.reports.comparison.results import MAX_METRICS, best, results
from rankzero.runs.reports.recorded.recorded_run import RecordedRun
from rankzero.runs.reports.recorded.run_status import Status


def compared(tmp_path, *runs):
    return [
        ComparedRun(str(number), RecordedRun(tmp_path / str(number), **values), Status("finished"), {}, {})
        for number, values in enumerate(runs)
    ]


@pytest.mark.parametrize(
    ("values", "better", "expected"),
    [
        ([1.0, 2.0, 2.0], "max", {1, 2}),
        ([1.0, 2.0, None, math.nan], "min", {0}),
        ([1.0, 2.0], None, set()),
        ([1.0, 1.0], "max", set()),
        ([1.0, math.nan], "max", set()),
        ([], "max", set()),
    ],
)
def test_the_best_finite_value_is_marked_if_values_differ(values, better, expected):
    assert best(values, better) == expected


def test_rows_have_the_values_and_best_runs_of_all(tmp_path):
    first = {"epochs": 2, "max_epochs": 4, "steps": 1000, "metrics": {"val/loss": 0.5, "train/loss": 0.1}}
    second = {
        "epochs": 4,
        "max_epochs": 4,
        "samples": 7,
        "metrics": {"val/loss": math.nan, "extra": 1.0},
        "seconds": 70,
    }
    rows = {row.name: row for row in results(compared(tmp_path, first, second))[0]}
    assert rows["epochs"].values == ["2 of 4", "4"] and rows["steps"].values == ["1,000", "-"]
    assert rows["val/loss"].values == ["0.5", "not finite"] and rows["val/loss"].best == frozenset()
    assert rows["train/loss"].values == ["0.1", "-"] and rows["extra"].values == ["-", "1"]
    assert rows["last attempt"].values == ["-", "1 min 10 s"]
    assert list(rows).index("val/loss") < list(rows).index("extra")


def test_keep_best_overrides_the_direction_of_a_name_and_of_very_many_metrics_those_on_validation_data_remain(tmp_path):
    runs = [{"metrics": {"val/error_score": value}, "kept_best": ("max", "val/error_score")} for value in (1.0, 2.0)]
    (row,) = [row for row in results(compared(tmp_path, *runs))[0] if row.name == "val/error_score"]
    assert row.best == {1}
    metrics = {f"m{number:02}": 1.0 for number in range(MAX_METRICS)} | {"val/loss": 1.0}
    rows, omitted = results(compared(tmp_path, {"metrics": metrics}))
    assert "val/loss" in {row.name for row in rows} and omitted == [f"m{MAX_METRICS - 1}"]
