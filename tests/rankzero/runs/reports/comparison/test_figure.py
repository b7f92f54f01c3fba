import math
import warnings

import pytest
from matplotlib.colors import to_hex

from rankzero.runs.reports.comparison.figure import STYLES, draw, save
from rankzero.runs.reports.comparison.panels import Line, Panel
from rankzero.runs.reports.palette import COLORS


def panel(title, runs, values=(3.0, 2.0, 1.0)):
    return Panel(title, [Line(number, [0.0, 100.0, 200.0], list(values)) for number in range(runs)])


def legend_texts(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_each_panel_has_a_line_of_another_style_per_run_and_the_legend_lists_only_runs_that_are_drawn():
    figure = draw(["a", "b"], [panel("train loss", 2), panel("val/accuracy", 2)], "samples")
    assert [axes.get_title() for axes in figure.axes] == ["train loss", "val/accuracy"]
    assert [axes.get_xlabel() for axes in figure.axes] == ["training samples of all processes"] * 2
    assert [len(axes.lines) for axes in figure.axes] == [2, 2]
    assert list(figure.axes[0].lines[0].get_xdata()) == [0.0, 100.0, 200.0]
    assert legend_texts(figure) == ["a", "b"]
    figure = draw([str(number) for number in range(8)], [panel("val/loss", 8)], "steps")
    assert [to_hex(line.get_color()).upper() for line in figure.axes[0].lines] == list(COLORS)
    assert [line.get_linestyle() for line in figure.axes[0].lines] == list(STYLES)
    assert all(STYLES[index] != STYLES[index + 1] for index in range(7))
    figure = draw(["a", "b"], [Panel("val/loss", [Line(1, [0.0], [1.0])])], "steps")
    assert legend_texts(figure) == ["b"]
    assert figure.axes[0].lines[0].get_color() == figure.legends[0].get_lines()[0].get_color() == COLORS[1]


@pytest.mark.parametrize(
    ("runs", "panels"),
    [(1, 1), (8, 6), *(pytest.param(*size, marks=pytest.mark.soak) for size in ((8, 1), (2, 3), (1, 6)))],
)
def test_nothing_is_cut_off_and_the_legend_covers_no_panel(runs, panels):
    labels = [f"resnet50-imagenet-lr0.1-weight-decay-1e-4-mixup-cosine-warmup-seed{number}" for number in range(runs)]
    titles = [f"val/a_rather_long_metric_{number}_accuracy" for number in range(panels)]
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
        figure = draw(["a"], [Panel("val/loss", [Line(0, [0.0, seconds], [1.0, 2.0])])], "seconds")
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
