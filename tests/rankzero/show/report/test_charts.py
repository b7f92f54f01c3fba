import math

import pytest

from rankzero.show.report.charts import (
    MAX_CHARTS,
    MAX_LINES,
    Scale,
    charts_of,
    mapped_ticks,
    reduced,
    step_scale,
    value_scale,
)
from rankzero.show.report.curves import STEP_PARTS, Curve


def curve(*values, every=10):
    return Curve([every * index for index in range(len(values))], [0.0] * len(values), list(values))


def titles(charts):
    return [(chart.title, chart.unit, [line.name for line in chart.lines]) for chart in charts]


def test_curves_of_the_same_quantity_share_a_chart_with_its_unit_and_the_loss_comes_first():
    tags = (
        *("acc_epoch", "train_acc", "val/acc_epoch", "val_acc_step", "train/mean_loss", "train/loss", "val_loss"),
        *("val/loss/dataloader_idx_1", "train/lr", "train/lr-1", "train/samples_per_second", "test_mix", "tests"),
        *("weights/gradient_norm", "epoch", "hp_metric", "x_axis/epoch", "world/first_gradient_ms/slow_rank_001"),
    )
    charts = charts_of({tag: curve(1.0, 2.0) for tag in tags}, [0])
    assert titles(charts.training) == [
        ("loss", "no unit", ["train/mean_loss", "train/loss", "val_loss", "val/loss/dataloader_idx_1"]),
        ("acc", "no unit", ["acc_epoch", "train_acc", "val/acc_epoch", "val_acc_step"]),
        ("mix", "no unit", ["test_mix"]),
        ("tests", "no unit", ["tests"]),
        ("learning rate", "no unit", ["train/lr", "train/lr-1"]),
        ("speed", "samples/s", [""]),
        ("gradient norm", "no unit", [""]),
    ]
    assert not charts.resources and not charts.ranks and charts.step_time is None
    tags = ("workload/mfu_percent", "workload/host_memory_gib", "wall_time/checkpoint_s", "workload/mine")
    assert titles(charts_of({tag: curve(1.0, 2.0) for tag in tags}, [0]).resources) == [
        ("time to save a checkpoint", "s", [""]),
        ("host memory of a rank", "GiB", [""]),
        ("model FLOP/s utilization", "%", [""]),
        ("workload/mine", "no unit", ["workload/mine"]),
    ]


def step_time(**parts):
    return charts_of({f"wall_time/{name}_ms": values for name, values in parts.items()}, [0]).step_time


def test_parts_of_a_step_are_stacked_and_parts_without_time_and_steps_below_zero_are_left_out():
    parts = {"data_wait": (1.0, 3.0), "backward": (6.0, 6.0), "exposed_communication": (0.0, 0.0)}
    chart = step_time(**{name: curve(*values, every=1) for name, values in parts.items()})
    assert chart.title == "8 ms per step"
    assert [(area.name, area.mean, area.percent) for area in chart.areas] == [
        ("waiting for data", "2", 25.0),
        ("backward pass", "6", 75.0),
    ]
    assert step_time(forward=curve(0.0, 0.0)) is None
    assert step_time(forward=Curve([-1, 0, 1], [0.0] * 3, [5.0, 2.0, 2.0])).title == "2 ms per step"
    assert step_time(forward=Curve([-2, -1], [0.0] * 2, [5.0, 2.0])) is None


def test_the_parts_of_many_steps_are_averaged():
    for count in (2, 200, 20_000):
        (area,) = step_time(forward=curve(*[1.0, 3.0] * (count // 2), every=1)).areas
        assert (area.mean, area.percent) == ("2", 100.0) and len(area.points.split()) <= 300
    parts = {tag: Curve([0, 9], [], [0.0, 0.0]) for tag in STEP_PARTS}
    parts["wall_time/forward_ms"] = Curve([0, 9], [], [110.0, 10.0])  # weighed by the steps of each interval
    (area,) = charts_of(parts, []).step_time.areas
    assert area.mean == "20" and area.percent == 100.0


def test_charts_lines_and_ranks_are_limited_and_the_slowest_ranks_are_shown_beside_the_median():
    charts = charts_of({f"metric_{number:03d}": curve(1.0, 2.0) for number in range(40)}, [0])
    assert len(charts.training) == MAX_CHARTS and len(charts.omitted) == 40 - MAX_CHARTS
    (chart,) = charts_of({f"loss/dataloader_idx_{number}": curve(1.0, 2.0) for number in range(9)}, [0]).training
    assert len(chart.lines) == MAX_LINES and chart.notes == [f"{9 - MAX_LINES} more in TensorBoard"]
    ranks = {f"world/data_wait_ms/rank_{rank:03d}": curve(float(rank), float(rank)) for rank in range(32)}
    (chart,) = charts_of(ranks, [0]).ranks
    slowest = [f"rank {rank:03d}" for rank in (31, 30, 29, 28, 27)]
    assert [line.name for line in chart.lines] == ["median of 32 ranks", *slowest]
    assert chart.lines[0].last == "15.5" and chart.title == "waiting for data"


def test_axes_are_offered_if_they_were_logged_and_have_marks_of_attempts_whose_labels_do_not_overlap():
    curves = {"loss": curve(1.0, 2.0, 3.0), "x_axis/samples": curve(0.0, 100.0, 200.0), "x_axis/epoch": curve(1.0)}
    charts = charts_of(curves, [0])
    assert [name for name, _ in charts.axes] == ["steps", "samples"]
    assert [tick.label for tick in charts.axes[1][1]] == ["0", "50", "100", "150", "200"]
    for first_steps, marks in (
        ([0, 0, 50, 51, 52, 90, 900], [(0, "2"), (50, "3"), (51, ""), (52, ""), (90, "6")]),
        ([0, 50, 50, 50], [(50, "4")]),
    ):
        charts = charts_of({"loss": curve(*[1.0] * 11)}, first_steps)
        assert [tuple(mark) for mark in charts.attempts] == marks


def test_values_that_are_not_finite_are_counted_and_a_run_without_curves_has_no_charts():
    (chart,) = charts_of({"loss": curve(1.0, math.nan, math.inf, 2.0)}, [0]).training
    assert chart.notes == ["2 values are not finite (NaN or infinity)"]
    (chart,) = charts_of({"loss": curve(math.nan)}, [0]).training
    assert chart.notes == ["1 value is not finite (NaN or infinity)"] and chart.lines[0].last == "not finite"
    charts = charts_of({"x_axis/epoch": curve(1.0, 2.0)}, [0, 5])
    assert not charts.training and not charts.axes and not charts.attempts


UNIT = Scale(0.0, 1.0)


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        (Scale(0, 144), ["0", "20", "40", "60", "80", "100", "120", "140"]),
        (Scale(-0.3, 0.7), ["-0.2", "0", "0.2", "0.4", "0.6"]),
        (Scale(0, 27_000), ["0", "5k", "10k", "15k", "20k", "25k"]),
        (Scale(9e5, 1.4e6), ["900k", "1M", "1.1M", "1.2M", "1.3M", "1.4M"]),
        (Scale(0, 5e-5), ["0", "1e-5", "2e-5", "3e-5", "4e-5", "5e-5"]),
        (Scale(0.005, 3.0, True), ["0.01", "0.1", "1"]),
        (Scale(1, 60, True), ["1", "3", "10", "30"]),
        (Scale(1e-9, 1e9, True), ["1e-9", "1e-5", "0.1", "1000", "10M"]),
    ],
)
def test_ticks_are_round_values_or_powers_of_ten_with_as_many_decimals_as_they_need(scale, expected):
    assert [tick.label for tick in scale.ticks(5)] == expected


def test_values_with_a_unit_and_early_steps_begin_at_zero_and_a_wide_range_of_losses_is_logarithmic():
    assert value_scale([8.0, 10.0], from_zero=True, may_be_log=False).low == 0
    assert value_scale([8.0, 10.0], from_zero=False, may_be_log=True) == Scale(8.0 - 0.12, 10.0 + 0.12)
    assert value_scale([0.01, 10.0], from_zero=False, may_be_log=True).is_log
    assert not value_scale([0.0, 10.0], from_zero=False, may_be_log=True).is_log
    constant = value_scale([5.0, 5.0], from_zero=False, may_be_log=True)
    assert constant.low < 5.0 < constant.high
    assert step_scale([9, 300]) == Scale(0, 300) and step_scale([900, 1000]) == Scale(900, 1000)
    assert step_scale([0]) == Scale(0, 1)


def test_a_reduced_curve_keeps_first_last_extreme_and_missing_values():
    values = [math.sin(index / 1000) for index in range(100_000)]
    values[31_234], values[77_777], values[50_000] = 9.0, -9.0, math.nan
    kept = reduced(values)
    assert {0, 31_234, 50_000, 77_777, 99_999} <= set(kept) and len(kept) < 1100 and kept == sorted(set(kept))
    assert reduced([1.0] * 1000) == list(range(1000))


def test_ticks_of_samples_lie_at_the_steps_that_have_used_them():
    ticks = mapped_ticks([10, 20, 30], [100.0, 200.0, 600.0], Scale(0, 40))  # a larger batch from step 20 on
    labels, positions = zip(*((tick.label, tick.position) for tick in ticks), strict=True)
    assert labels == ("0", "200", "400", "600", "800", "1000") and positions == (0, 50, 62.5, 75, 87.5, 100)
    assert mapped_ticks([10], [100.0], UNIT) == [] and mapped_ticks([1, 2], [5.0, 5.0], UNIT) == []
