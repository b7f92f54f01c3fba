import io
import os
import sys

import pytest
from rich.box import SQUARE
from rich.cells import cell_len
from rich.table import Table

from rankzero.show.report.curves import SERIES
from rankzero.show.text_table import Column, Row, column_widths, print_table, rendered
from rankzero.text import (
    age,
    compact,
    direction,
    duration,
    is_measurement,
    is_training_loss,
    is_validation,
    main_metric,
    metrics_line,
    number_text,
    rough_duration,
    shortened,
    unique_metrics,
)


@pytest.mark.parametrize(
    ("text", "width", "expected"),
    [
        ("short", 10, "short"),
        ("resnet-with-a-long-name-seed1", 13, "resnet…-seed1"),
        ("a\nb\x1b[0m", 10, "a?b?[0m"),
        ("漢字漢字漢字", 7, "漢字…字"),
        ("abcdefgh", 4, "abcd"),
        ("abcdefgh", 0, ""),
    ],
)
def test_long_texts_lose_their_middle_and_control_characters(text, width, expected):
    assert shortened(text, width) == expected


TIMES = {
    age: [(-5, "0 s"), (59.9, "59 s"), (60, "1 min"), (7199, "1 h"), (86400 * 5, "5 d")],
    duration: [(None, "-"), (12.54, "12.5 s"), (59.96, "1 min 0 s"), (310, "5 min 10 s"), (7500, "2 h 5 min")],
    rough_duration: [
        (44.6, "45 s"),
        (59.6, "1 min"),
        (3571, "1 h 00 min"),
        (172_740, "47 h 59 min"),
        (273_600, "3 d 04 h"),
    ],
}


@pytest.mark.parametrize("format_time", TIMES)
def test_times_have_one_or_two_units(format_time):
    for seconds, expected in TIMES[format_time]:
        assert format_time(seconds) == expected


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        *((None, "-"), (0, "0"), (1.25, "1.2"), (9.97, "10"), (460, "460"), (9999, "9999"), (12_345, "12.3k")),
        *((999_960, "1.0M"), (123_456_789, "123M"), (1.2e9, "1.2G"), (float("nan"), "?"), (9e15, "9000T")),
    ],
)
def test_counts_have_at_most_five_characters(number, expected):
    assert compact(number) == expected and len(expected) <= 5


def test_metrics_have_four_significant_digits():
    values = {
        0.98765: "0.9877",
        1e-9: "1e-09",
        None: "-",
        1234.5: "1,234",
        -56789.4: "-56,789",
        2e12: "2e+12",
        0.0: "0",
    }
    assert [number_text(value) for value in values] == list(values.values())
    assert {number_text(float(value)) for value in ("inf", "-inf", "nan")} == {"not finite"}
    assert [number_text(value, 6) for value in (0.98765432, 1234.5678, 1e6)] == ["0.987654", "1,234.57", "1,000,000"]


def test_the_longest_texts_are_shortened_first_none_below_its_minimum_and_none_in_a_pipe(monkeypatch, capsys):
    columns = [Column("name", 6), Column("status"), Column("other", 4)]
    rows = [Row(["n" * 30, "finished", "o" * 20])]
    assert column_widths(columns, rows, 100) == ([30, 8, 20], 2)
    assert column_widths(columns, rows, 40) == ([15, 8, 15], 1)
    assert column_widths(columns, rows, 10) == ([6, 8, 4], 1)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("shutil.get_terminal_size", lambda fallback: os.terminal_size(fallback))
    print_table([Column("name", 6)], [Row(["n" * 500])])
    assert "n" * 500 in capsys.readouterr().out


@pytest.mark.parametrize(("encoding", "corner"), [("utf-8", "┌"), ("ascii", "+"), ("latin-1", "+")])
def test_borders_and_texts_use_characters_that_the_terminal_can_show(monkeypatch, encoding, corner):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("COLUMNS", "12")
    table = Table(box=SQUARE)
    table.add_row("漢字")
    table.add_row("value")
    text = rendered(table, has_colors=False)
    assert text.startswith(corner) and "?" not in text.splitlines()[0]
    print_table([Column("name", 6), Column("n", is_number=True)], [Row(["first-漢字-second", "1"])])
    stream.seek(0)
    assert stream.read().splitlines()[1].startswith("fir")
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert "value" in rendered(table, has_colors=True)  # a notebook gets text


@pytest.mark.parametrize(
    ("names", "kept_best", "expected"),
    [
        (["train/loss", "val/loss", "val/accuracy"], None, "val/accuracy"),
        (["train/loss", "val/loss", "val/accuracy"], ("min", "val/loss"), "val/loss"),
        (["val_loss", "val_acc"], None, "val_acc"),
        (["valLoss", "train_acc"], None, "valLoss"),
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


CASES = {
    "step and epoch": ({"loss": 1.0, "loss_step": 2.0, "loss_epoch": 1.0}, {"loss": 1.0}),
    "the epoch's value counts": ({"loss": 2.0, "loss_step": 2.0, "loss_epoch": 1.0}, {"loss": 1.0}),
    "before the first epoch's end": ({"loss": 2.0, "loss_step": 2.0}, {"loss": 2.0}),
    "a name that ends so": ({"time_step": 3.0, "best_epoch": 4.0}, {"time_step": 3.0, "best_epoch": 4.0}),
    "two metrics": ({"time": 1.0, "time_step": 3.0}, {"time": 1.0, "time_step": 3.0}),
    "loaders": (
        {f"a{kind}/dataloader_idx_{n}": float(n) for kind in ("", "_step", "_epoch") for n in (0, 1)},
        {"a/dataloader_idx_0": 0.0, "a/dataloader_idx_1": 1.0},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_metric_is_shown_once(name):
    metrics, shown = CASES[name]
    assert unique_metrics(metrics) == shown


def test_a_line_with_any_characters_fits_its_width_and_states_how_many_metrics_are_omitted():
    metrics = {f"metric_{number:02}": float(number) for number in range(30)}
    line = metrics_line("epoch 1/2 done  step 3", metrics, ["metric_29"], "7 s")
    assert len(line) <= 120 and line.startswith("epoch 1/2 done  step 3  metric_29 29  metric_00 0  ")
    shown = line.count("metric_")
    assert line.endswith(f"  +{30 - shown} more  7 s") and shown > 4
    assert metrics_line("head", {"x" * 200: 1.0}, [], "tail") == "head  +1 more  tail"
    assert metrics_line("head", {}, [], "tail") == "head  tail"
    line = metrics_line("head", {"損失" * 12: 1.0, "a\nb\x1b[31m": 2.0, "w" * 30: 3.0}, (), "tail")
    assert cell_len(line) <= 120 and line.isprintable() and "a?b?[31m 2" in line
