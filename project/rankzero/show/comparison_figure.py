"""Figure of the curves of runs. Imports matplotlib, and neither pyplot nor torch."""

import math
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from rankzero.checkpoints.atomic_files import replacing
from rankzero.show.comparison import EPOCHS, SAMPLES, SECONDS, STEPS, Panel
from rankzero.show.report.curves import COLORS
from rankzero.text import compact, direction, distinct, shortened

STYLES = ("-", "--", "-.", ":", "--", "-.", ":", "-")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

_X_LABELS = {STEPS: "optimizer steps", SAMPLES: "training samples of all processes", EPOCHS: "epochs"}
_PANEL_INCHES = (5.2, 3.6)
_LETTER_INCHES, _LEGEND_ROW_INCHES = 0.085, 0.23


def draw(labels: Sequence[str], panels: Sequence[Panel], kind: str) -> Figure:
    """Draws one panel per metric, and one legend below them."""
    columns = 1 if len(panels) == 1 else 2 if len(panels) in (2, 4) else 3
    rows = -(-len(panels) // columns)
    drawn = sorted({line.number for panel in panels for line in panel.lines})
    texts = distinct([labels[number] for number in drawn], width=44)
    width = max(6.4, columns * _PANEL_INCHES[0])
    legend_columns = min(len(texts), max(1, int(width / (0.8 + _LETTER_INCHES * max(map(len, texts))))))
    height = rows * _PANEL_INCHES[1] + 0.2 + _LEGEND_ROW_INCHES * -(-len(texts) // legend_columns)
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    scale, x_label = _x_unit(panels, kind)
    for position, panel in enumerate(panels, 1):
        axes = figure.add_subplot(rows, columns, position)
        _draw_panel(axes, panel, scale)
        axes.set_xlabel(x_label)
    _add_legend(figure, texts, drawn, legend_columns)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Writes the figure in the format of the path's suffix, completely or not at all.

    Raises:
        OSError: The file cannot be written.
    """
    with replacing(path, f".{os.getpid()}") as temporary, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # a run's name may be in any script
        figure.savefig(temporary, format=path.suffix[1:].lower(), dpi=150)


def _draw_panel(axes: Axes, panel: Panel, scale: float) -> None:
    for line in panel.lines:
        axes.plot([x / scale for x in line.x], line.y, **_appearance(line.number, len(line.x)))
    title = f"{panel.title} (means of {panel.averaged} values)" if panel.averaged > 1 else panel.title
    axes.set_title(shortened(title, 56), parse_math=False, fontsize=11)
    axes.set_ylabel(shortened(panel.title, 32), parse_math=False)
    values = [value for line in panel.lines for value in line.y if math.isfinite(value)]
    if not values:
        axes.text(0.5, 0.5, "no finite values", transform=axes.transAxes, ha="center", va="center")
    elif direction(panel.title) == "min" and min(values) > 0 and max(values) > 100 * min(values):
        axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda number, _: f"{number:g}" if abs(number) < 1e4 else compact(number))
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _appearance(number: int, points: int) -> dict[str, Any]:
    """Returns color, style and marker of a run, each different from those of its neighbors."""
    color, style, marker = (choices[number % len(choices)] for choices in (COLORS, STYLES, MARKERS))
    shown_marker = marker if points <= 40 else None
    return {"color": color, "linestyle": style, "linewidth": 1.6, "marker": shown_marker, "markersize": 4}


def _add_legend(figure: Figure, texts: Sequence[str], numbers: Sequence[int], columns: int) -> None:
    handles = [Line2D([], [], **_appearance(number, 1)) for number in numbers]
    names = [str(number) for number in numbers]  # matplotlib leaves out labels that begin with an underscore
    legend = figure.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False, handlelength=3.5)
    for entry, text in zip(legend.get_texts(), texts, strict=True):
        entry.set_parse_math(False)
        entry.set_text(text)


def _x_unit(panels: Sequence[Panel], kind: str) -> tuple[float, str]:
    """Returns the size of the unit of the horizontal axis, and the label of the axis."""
    if kind != SECONDS:
        return 1.0, _X_LABELS[kind]
    largest = max(max(line.x, default=0.0) for panel in panels for line in panel.lines)
    unit, size = ("s", 1.0) if largest < 600 else ("min", 60.0) if largest < 4 * 3600 else ("h", 3600.0)
    return size, f"time in attempts ({unit})"
