import math
import warnings

import pytest
from matplotlib.colors import to_hex

from rankzero.runs.metrics_file import Row, append_rows
from rankzero.runs.recorded_run import RecordedRun, Status
from rankzero.show import comparison
from rankzero.show.comparison import EPOCHS, MAX_PANELS, SAMPLES, TRAIN_LOSS, ComparedRun, Panel, Result, best
from rankzero.show.comparison_figure import STYLES, draw, save
from rankzero.show.report.curves import COLORS, Curve, read_curves
from rankzero.text import distinct


def panel(title, runs, values=(3.0, 2.0, 1.0)):
    return Panel(title, [comparison.Line(number, [0.0, 100.0, 200.0], list(values)) for number in range(runs)])


def legend_texts(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_each_panel_has_a_line_of_another_style_per_run_and_the_legend_lists_only_runs_that_are_drawn():
    figure = draw(["a", "b"], [panel("train loss", 2), panel("val/accuracy", 2)], "samples")
    assert [axes.get_title() for axes in figure.axes] == ["train loss", "val/accuracy"]
    assert [axes.get_xlabel() for axes in figure.axes] == ["training samples of all processes"] * 2
    assert [len(axes.lines) for axes in figure.axes] == [2, 2]
    assert legend_texts(figure) == ["a", "b"]
    figure = draw([str(number) for number in range(8)], [panel("val/loss", 8)], "steps")
    assert [to_hex(line.get_color()).upper() for line in figure.axes[0].lines] == list(COLORS)
    assert [line.get_linestyle() for line in figure.axes[0].lines] == list(STYLES)
    assert all(STYLES[index] != STYLES[index + 1] for index in range(7))
    figure = draw(["a", "b"], [Panel("val/loss", [comparison.Line(1, [0.0], [1.0])])], "steps")
    assert legend_texts(figure) == ["b"]
    assert figure.axes[0].lines[0].get_color() == figure.legends[0].get_lines()[0].get_color() == COLORS[1]


@pytest.mark.parametrize(("runs", "titles"), [(1, 1), (8, 6)])
def test_nothing_is_cut_off_and_the_legend_covers_no_panel(runs, titles):
    labels = [f"resnet50-imagenet-lr0.1-weight-decay-1e-4-mixup-cosine-warmup-seed{number}" for number in range(runs)]
    titles = [f"val/a_rather_long_metric_{number}_accuracy" for number in range(titles)]
    figure = draw(labels, [panel(title, runs) for title in titles], "steps")
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    legend = figure.legends[0].get_window_extent(renderer)
    assert legend.x0 >= 0 and legend.x1 <= figure.bbox.x1 and legend.y0 >= 0
    for axes in figure.axes:
        box = axes.get_tightbbox(renderer)
        assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 + 1 and box.y1 <= figure.bbox.y1 + 1
        assert not box.overlaps(legend) and axes.get_window_extent(renderer).width > 200


def test_losses_have_a_logarithmic_axis_and_time_a_readable_unit():
    figure = draw(["a"], [panel("val/loss", 1, (10, 1, 0.01)), panel("val/accuracy", 1, (0.001, 0.1, 1.0))], "steps")
    assert [axes.get_yscale() for axes in figure.axes] == ["log", "linear"]
    for seconds, unit, last in ((500.0, "s", 500), (6000.0, "min", 100), (36000.0, "h", 10)):
        figure = draw(["a"], [Panel("val/loss", [comparison.Line(0, [0.0, seconds], [1.0, 2.0])])], "seconds")
        assert figure.axes[0].get_xlabel() == f"time in attempts ({unit})"
        assert figure.axes[0].lines[0].get_xdata()[-1] == last


def test_any_name_and_a_panel_without_finite_values_are_saved_in_the_format_of_the_suffix(tmp_path):
    labels = ["_hidden", "a$^{broken$", "漢字\x1b"]
    figure = draw(labels, [panel("val/$x_{$", 3), panel("val/loss", 3, [math.nan] * 3)], "steps")
    assert legend_texts(figure) == ["_hidden", "a$^{broken$", "漢字?"]
    assert figure.axes[1].texts[0].get_text() == "no finite values"
    for suffix, beginning in {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF", ".PNG": b"\x89PNG"}.items():
        path = tmp_path / f"figure{suffix}"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            save(figure, path)
        assert path.read_bytes().startswith(beginning) and list(tmp_path.iterdir()) == [path]
        path.unlink()


def run_of(tmp_path, label="a", kept_best=None, **tags):
    curves = {
        tag.replace("__", "/"): Curve(list(range(len(values))), [0.0] * len(values), list(values))
        for tag, values in tags.items()
    }
    run = RecordedRun(tmp_path / label, config=f"keep_best: {kept_best}")
    return ComparedRun(label, run, Status("finished"), {}, curves)


def test_train_loss_and_validation_metrics_are_drawn_that_of_keep_best_first_then_common_ones(tmp_path):
    first = run_of(tmp_path, train__loss=[1], val__loss=[1], val__accuracy=[1], val_f1=[1], x_axis__samples=[1])
    second = run_of(tmp_path, train__loss=[1], val__loss=[1], val__accuracy=[1], train__lr=[1], learning=[1])
    assert comparison.chosen_metrics([first, second]) == ([TRAIN_LOSS, "val/accuracy", "val/loss", "val_f1"], [])
    kept = run_of(tmp_path, kept_best="min:val/loss", val__loss=[1], val__accuracy=[1])
    assert comparison.chosen_metrics([kept])[0] == ["val/loss", "val/accuracy"]
    assert comparison.chosen_metrics([run_of(tmp_path, reward=[1], x_axis__epoch=[1])])[0] == ["reward"]
    assert comparison.chosen_metrics([run_of(tmp_path)]) == ([], [])
    many = run_of(tmp_path, train__loss=[1], **{f"val__m{number}": [1] for number in range(MAX_PANELS)})
    assert comparison.chosen_metrics([many])[1] == [f"val/m{MAX_PANELS - 1}"]


def test_missing_and_not_finite_curves_are_drawn_as_far_as_possible_and_noted(tmp_path):
    whole = run_of(tmp_path, "a", val__loss=[1, 2])
    broken = run_of(tmp_path, "b", val__loss=[1, math.nan], val__acc=[1])
    drawn, notes = comparison.panels([whole, broken, run_of(tmp_path, "empty")], ["val/loss", "val/acc"], "steps")
    assert [[line.number for line in panel.lines] for panel in drawn] == [[0, 1], [1]]
    assert notes == ["b: 1 of 2 values of val/loss are not finite", "a: has no curve of val/acc"]


def test_long_curves_are_drawn_as_means_of_finite_values_at_the_steps_samples_or_epochs_of_their_rows(tmp_path):
    (panel,), _ = comparison.panels([run_of(tmp_path, loss=[1.0, 3.0] * comparison.MAX_POINTS)], [TRAIN_LOSS], "steps")
    assert panel.averaged == 2 and panel.lines[0].y == [2.0] * comparison.MAX_POINTS
    assert panel.lines[0].x[:2] == [0.5, 2.5]
    assert comparison.means([1, math.nan, 3, math.inf, 5], 3) == [1.0, 4.0]
    assert math.isnan(comparison.means([math.nan], 2)[0]) and comparison.means([], 2) == []
    append_rows(tmp_path, [Row(9, 0.0, {"loss": 1.0}, 0.5, 320), Row(19, 0.0, {"loss": 0.5})], durably=False)
    run = ComparedRun("a", RecordedRun(tmp_path), Status("finished"), {}, read_curves(tmp_path))
    for kind, first in {SAMPLES: 320, EPOCHS: 0.5}.items():
        (panel,), notes = comparison.panels([run], [TRAIN_LOSS], kind)
        assert panel.lines[0].x[0] == first and math.isnan(panel.lines[0].x[1]) and not notes


def compared(tmp_path, *runs, config=""):
    return [
        ComparedRun(str(number), RecordedRun(tmp_path / str(number), {}, values, config), Status("finished"), {}, {})
        for number, values in enumerate(runs)
    ]


def test_rows_have_the_values_and_best_runs_of_all(tmp_path):
    first = {"epochs": 2, "max_epochs": 4, "steps": 1000, "metrics": {"val/loss": 0.5, "train/loss": 0.1}}
    metrics = {"val/loss": math.nan, "extra": 1.0}
    second = {"epochs": 4, "max_epochs": 4, "samples": 7, "metrics": metrics, "seconds": 70}
    rows = {row.name: row for row in comparison.results(compared(tmp_path, first, second))[0]}
    assert best([1.0, 2.0, 2.0, None], "max") == {1, 2} and best([1.0, 2.0], None) == best([1.0, 1.0], "max") == set()
    assert rows["epochs"].values == ["2 of 4", "4"] and rows["steps"].values == ["1,000", "-"]
    assert rows["val/loss"].values == ["0.5", "not finite"] and rows["val/loss"].best == frozenset()
    assert rows["train/loss"].values == ["0.1", "-"] and rows["extra"].values == ["-", "1"]
    assert rows["last attempt"].values == ["-", "1 min 10 s"]
    assert list(rows).index("val/loss") < list(rows).index("extra")


def test_keep_best_overrides_the_direction_of_a_name_and_of_very_many_metrics_those_on_validation_data_remain(tmp_path):
    runs = [{"metrics": {"val/error_score": value}} for value in (1.0, 2.0)]
    rows, _ = comparison.results(compared(tmp_path, *runs, config="keep_best: max:val/error_score"))
    (row,) = [row for row in rows if row.name == "val/error_score"]
    assert row.best == {1}
    metrics = {f"m{number:02}": 1.0 for number in range(comparison.MAX_METRICS)} | {"val/loss": 1.0}
    rows, omitted = comparison.results(compared(tmp_path, {"metrics": metrics}))
    assert "val/loss" in {row.name for row in rows} and omitted == [f"m{comparison.MAX_METRICS - 1}"]


def as_dict(*configs):
    return {difference.name: difference.values for difference in comparison.differences(configs)}


def test_only_settings_that_differ_are_returned_and_null_equals_absent_but_false_and_zero_do_not():
    first = {"seed_everything": 0, "model": {"class_path": "MLP", "init_args": {"width": 8, "depth": 2}}}
    second = {"seed_everything": 0, "model": {"class_path": "MLP", "init_args": {"width": 16, "depth": 2}}}
    assert as_dict(first, second) == {"model.width": ["8", "16"]}
    assert as_dict(first, first, second) == {"model.width": ["8", "8", "16"]}
    for name in ("name", "root", "resume", "launcher", "node_rank"):
        assert comparison.differences([{name: "a"}, {name: "b"}]) == []
    assert comparison.differences([{"trainer": {"root": "a"}}, {"trainer": {"root": "b"}}]) == []
    assert comparison.differences([{"a": None, "b": 1}, {"b": 1}]) == []
    values = [{"a": None, "b": 1}, {"a": False, "b": 1}, {"a": 0, "b": 1}, {"b": 1}]
    assert as_dict(*values) == {"a": ["null", "false", "0", "-"]}
    assert as_dict({"seed": 1}, {}, {"seed": 2}) == {"seed": ["1", "-", "2"]}
    assert comparison.differences([{"seed": 1}, {}]) is None  # an unknown configuration is no difference


def test_classes_settings_that_only_one_has_and_items_of_nested_lists_are_differences():
    first = {"model": {"class_path": "MLP", "init_args": {"width": 8}}, "data": {"class_path": "A", "init_args": {}}}
    second = {"model": {"class_path": "ResNet", "init_args": {"depth": 18}}, "data": {"class_path": "B"}}
    model = {"model": ["MLP", "ResNet"], "model.width": ["8", "-"], "model.depth": ["-", "18"]}
    assert as_dict(first, second) == {**model, "data": ["A", "B"]}
    callbacks = [{"class_path": "A", "init_args": {"x": 1}}, {"class_path": "B"}]
    first = {"trainer": {"callbacks": callbacks, "sizes": [1, 2]}}
    second = {"trainer": {"callbacks": [{"class_path": "A", "init_args": {"x": 2}}], "sizes": [1, 2, 3]}}
    items = {"trainer.callbacks.0.x": ["1", "2"], "trainer.callbacks.1": ["B", "-"]}
    assert as_dict(first, second) == {**items, "trainer.sizes": ["[1, 2]", "[1, 2, 3]"]}


@pytest.mark.parametrize("runs", [1, 2, 4, 8])
@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit_the_terminal_and_shorten_no_number(capsys, monkeypatch, runs, width):
    monkeypatch.setenv("COLUMNS", str(width))
    labels = [f"resnet50-imagenet-with-a-long-name-seed{number}" for number in range(runs)]
    settings = [Result("model.optimizer.a_very_long_name.lr", [f"0.{number}" * 20 for number in range(runs)])]
    samples = [f"{number + 1:,}" for number in range(123_456_789, 123_456_789 + runs)]
    comparison.print_comparison(labels, settings, [Result("samples", samples, frozenset({runs - 1}))])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert all(any(sample in line for line in lines) for sample in samples)
    assert any(f"{samples[-1]}*" in line for line in lines)
    assert all(any(f"seed{number}" in line for line in lines) for number in range(runs))


def test_equal_settings_are_said_and_unknown_ones_are_not_and_names_equal_when_shortened_are_numbered(
    capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "80")
    comparison.print_comparison(["a", "b"], [], [Result("steps", ["1", "2"])])
    assert "all settings are equal" in capsys.readouterr().out
    comparison.print_comparison(["a", "b"], None, [Result("steps", ["1", "2"])])
    assert "settings" not in capsys.readouterr().out
    names = ["resnet-lr0.1-seed1", "resnet-lr0.3-seed1"]
    assert distinct(names, 20) == names
    assert distinct(names, 9) == ["1 res…ed1", "2 res…ed1"]
    assert distinct(names, 12, (3, 11))[1].startswith("11 ")


@pytest.mark.parametrize(
    ("starts", "times", "seconds"),
    [
        ([100.0, 1000.0], [110.0, 120.0, 1010.0, 1030.0], [10.0, 20.0, 30.0, 50.0]),
        ([100.0, 500.0, 600.0, 1000.0], [110.0, 1010.0], [10.0, 20.0]),
        ([], [110.0, 1010.0], [0.0, 900.0]),
        ([5000.0], [110.0, 1010.0], [0.0, 0.0]),
    ],
    ids=["two attempts", "attempts without values", "unknown starts", "a clock that was set back"],
)
def test_seconds_leave_out_the_time_between_attempts(starts, times, seconds):
    loss = Curve(list(range(1, len(times) + 1)), times, [1.0] * len(times))
    assert comparison.training_seconds(starts, {"loss": loss}, times) == seconds
