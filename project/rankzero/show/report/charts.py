"""Chooses the charts of a report from the curves of a run. Does not import torch."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median

from rankzero.show.report import plot
from rankzero.show.report.curves import EPOCH, SAMPLES, SERIES, STEP_PARTS, Curve
from rankzero.show.report.plot import BRIGHT_COLORS, Scale, Tick
from rankzero.text import GROUPS, number_text

UNITS = {
    **dict.fromkeys(("samples_per_second", "samples_per_second_per_device"), "samples/s"),
    "teraflops_per_second": "TFLOP/s",
    "percent": "%",
    "gib": "GiB",
    "mib": "MiB",
    "ms": "ms",
    "s": "s",
    "batches": "batches",
}
"""End of a quantity's name -> its unit."""

_SPLIT = re.compile(r"^(train|training|val|valid|validation|test)[/_.-](?=.)")
_VARIANT = re.compile(r"(_step|_epoch)?(/dataloader_idx_\d+)?$")


def is_hidden(tag: str) -> bool:
    """Returns whether a tag gets no line of its own: axes, parts of a step, copies of other values."""
    is_part = tag in STEP_PARTS or tag == "wall_time/step_ms"
    return is_part or tag in ("epoch", "hp_metric") or tag.startswith(("x_axis/", "world/"))


def quantity_of(tag: str) -> str:
    """Returns what a tag measures: `val/loss_epoch/dataloader_idx_0` -> `loss`."""
    if tag.startswith(GROUPS):
        return tag
    name = _VARIANT.sub("", _SPLIT.sub("", tag), count=1) or tag
    return "loss" if name == "mean_loss" else "lr" if re.fullmatch(r"lr-\d+", name) else name


def chart_order(quantity: str) -> tuple[int, str]:
    """Returns the sort key of a chart: the loss first, then the metrics, then learning rate, speed and gradients."""
    last = ("lr", "samples_per_second", "weights/gradient_norm")
    rank = last.index(quantity) + 2 if quantity in last else 0 if quantity == "loss" else 1
    return rank, quantity


MAX_CHARTS, MAX_LINES = 24, len(BRIGHT_COLORS)
MAX_AREA_POINTS = 150

_RANK = re.compile(r"(world/.+)/(rank_\d+)")


@dataclass(frozen=True)
class Line:
    """One curve of a chart: its name, color, polylines, and its last, lowest and highest value as text.

    The name is empty if the title of the chart is the same.
    """

    name: str
    color: str
    paths: Sequence[str]
    has_dots: bool
    last: str
    low: str
    high: str


@dataclass(frozen=True)
class Area:
    """One layer of a stacked chart: its name, color, polygon, and its mean and share as text."""

    name: str
    color: str
    points: str
    mean: str
    percent: float


@dataclass(frozen=True)
class Chart:
    """A chart: title, unit, curves or layers, ticks of the vertical axis, and remarks on values that it omits."""

    title: str
    unit: str
    ticks: Sequence[Tick]
    lines: Sequence[Line] = ()
    areas: Sequence[Area] = ()
    notes: Sequence[str] = ()


@dataclass
class Charts:
    """All charts of a report.

    A reader can choose from the horizontal `axes`, each with its name. `attempts` has the position and the number of
    each attempt that began after the first step; `omitted` names the quantities that have no chart.
    """

    training: list[Chart] = field(default_factory=list)
    step_time: Chart | None = None
    resources: list[Chart] = field(default_factory=list)
    ranks: list[Chart] = field(default_factory=list)
    axes: list[tuple[str, list[Tick]]] = field(default_factory=list)
    attempts: list[Tick] = field(default_factory=list)
    omitted: list[str] = field(default_factory=list)
    is_downsampled: bool = False


def charts_of(curves: Mapping[str, Curve], attempt_steps: Iterable[int]) -> Charts:
    """Returns the charts of a run."""
    charts = Charts()
    groups, ranks = _grouped(curves)
    shown = [curve for tag, curve in curves.items() if not tag.startswith("x_axis/")]
    if not shown:
        return charts
    x = plot.step_scale([step for curve in shown for step in (curve.steps[0], curve.steps[-1])])
    charts.is_downsampled = any(curve.is_downsampled for curve in shown)
    charts.axes = _axes(curves, x)
    charts.attempts = _attempts(attempt_steps, x)
    for quantity, group in groups.items():
        chart = _line_chart(quantity, group, x)
        if quantity.startswith(("workload/", "wall_time/")):
            charts.resources.append(chart)
        elif len(charts.training) < MAX_CHARTS:
            charts.training.append(chart)
        else:
            charts.omitted.append(quantity)
    charts.ranks = [_line_chart(quantity, _slowest(group), x) for quantity, group in ranks.items()]
    charts.step_time = _step_time(curves, x)
    return charts


def _grouped(curves: Mapping[str, Curve]) -> tuple[dict[str, dict[str, Curve]], dict[str, dict[str, Curve]]]:
    """Groups curves by quantity (`train/loss` and `val_loss` are one chart) and, separately, those of single ranks."""
    groups: dict[str, dict[str, Curve]] = {}
    ranks: dict[str, dict[str, Curve]] = {}
    for tag, curve in curves.items():
        if match := _RANK.fullmatch(tag):
            ranks.setdefault(match[1], {})[match[2].replace("_", " ")] = curve
        elif not is_hidden(tag):
            groups.setdefault(quantity_of(tag), {})[tag] = curve
    return {quantity: groups[quantity] for quantity in sorted(groups, key=chart_order)}, ranks


def _line_chart(quantity: str, group: Mapping[str, Curve], x: Scale) -> Chart:
    shown = dict(list(group.items())[:MAX_LINES])
    unit = next((unit for end, unit in UNITS.items() if re.search(rf"(^|[_/]){end}$", quantity)), "")
    bounds = [bound for curve in shown.values() for bound in (curve.low, curve.high) if math.isfinite(bound)]
    may_be_log = any(word in quantity for word in ("loss", "norm", "perplexity"))
    y = plot.value_scale(bounds or [0.0, 1.0], bool(unit), may_be_log)
    lost = sum(curve.not_finite for curve in shown.values())
    notes = [f"{lost:,} value{'s are' if lost > 1 else ' is'} not finite (NaN or infinity)"] if lost else []
    if len(group) > len(shown):
        notes.append(f"{len(group) - len(shown):,} more in TensorBoard")
    series = SERIES.get(quantity) or SERIES.get(f"train/{quantity}")
    title = series.title if series else quantity
    unit_text = (unit or "no unit") + ", logarithmic scale" * y.is_log
    names = shown if len(group) > 1 or title == quantity else [""]
    lines = [_line(*line, x, y) for line in zip(names, shown.values(), BRIGHT_COLORS, strict=False)]
    return Chart(title, unit_text, y.ticks(), lines, notes=notes)


def _line(name: str, curve: Curve, color: str, x: Scale, y: Scale) -> Line:
    kept = plot.reduced(curve.values)
    paths = plot.paths([curve.steps[index] for index in kept], [curve.values[index] for index in kept], x, y)
    last, low, high = map(number_text, (curve.values[-1], curve.low, curve.high))
    return Line(name, color, paths, len(kept) <= 40, last, low, high)


def _step_time(curves: Mapping[str, Curve], x: Scale) -> Chart | None:
    """Returns the stacked parts of a step, averaged over at most `MAX_AREA_POINTS` intervals."""
    parts = {tag: dict(zip(curves[tag].steps, curves[tag].values, strict=True)) for tag in STEP_PARTS if tag in curves}
    steps = sorted(set.intersection(*(set(points) for points in parts.values()))) if parts else []
    parts = {tag: points for tag, points in parts.items() if any(points.values())}
    steps = [step for step in steps if step >= 0 and all(math.isfinite(points[step]) for points in parts.values())]
    if len(steps) < 2 or not parts:
        return None
    # Each value is the mean over the steps since the previous value.
    weights = {step: step - previous for previous, step in pairwise([-1, *steps])}
    size = math.ceil(len(steps) / MAX_AREA_POINTS)
    buckets = [steps[start : start + size] for start in range(0, len(steps), size)]
    middles = [bucket[0] if bucket is buckets[0] else bucket[-1] for bucket in buckets]
    layers = [[_mean(points, bucket, weights) for bucket in buckets] for points in parts.values()]
    means = [_mean(points, steps, weights) for points in parts.values()]
    total = sum(means)
    if total <= 0:
        return None
    y = plot.value_scale([sum(column) for column in zip(*layers, strict=True)], True, False)
    polygons = plot.areas(middles, layers, x, y)
    areas = [
        Area(STEP_PARTS[tag].title, color, points, number_text(mean), round(100 * mean / total, 1))
        for tag, points, mean in zip(parts, polygons, means, strict=True)
        for color in [BRIGHT_COLORS[list(STEP_PARTS).index(tag)]]
    ]
    return Chart(f"{number_text(total)} ms per step", "ms per step", y.ticks(), areas=areas)


def _mean(values: Mapping[int, float], steps: Sequence[int], weights: Mapping[int, int]) -> float:
    """Returns the weighted mean of the values at these steps."""
    return sum(values[step] * weights[step] for step in steps) / sum(weights[step] for step in steps)


def _slowest(group: Mapping[str, Curve]) -> dict[str, Curve]:
    """Returns the curves of a few ranks: all, or the slowest ones, and the median of all ranks."""
    if len(group) <= MAX_LINES:
        return dict(group)
    means = {
        name: fmean([value for value in curve.values if math.isfinite(value)] or [0.0]) for name, curve in group.items()
    }
    slowest = sorted(means, key=lambda name: -means[name])[: MAX_LINES - 1]
    by_step: dict[int, list[float]] = {}
    for curve in group.values():
        for step, value in zip(curve.steps, curve.values, strict=True):
            by_step.setdefault(step, []).append(value)
    middle = Curve(sorted(by_step), [], [median(by_step[step]) for step in sorted(by_step)])
    return {f"median of {len(group)} ranks": middle, **{name: group[name] for name in slowest}}


def _axes(curves: Mapping[str, Curve], x: Scale) -> list[tuple[str, list[Tick]]]:
    axes = [("steps", x.ticks())]
    for tag in (SAMPLES, EPOCH):
        if curve := curves.get(tag):
            axes.append((SERIES[tag].title, plot.mapped_ticks(curve.steps, curve.values, x)))
    return [(name, ticks) for name, ticks in axes if ticks]


def _attempts(steps: Iterable[int], x: Scale) -> list[Tick]:
    """Returns where each attempt but the first began; labels that would overlap an earlier one are empty.

    Of attempts that began at the same step, the last is shown.
    """
    marks: list[Tick] = []
    labeled = -100.0
    for attempt, step in enumerate(steps, 1):
        position = round(100 * x(step), 2)
        if marks and marks[-1].position == position:
            marks[-1] = Tick(position, str(attempt) if marks[-1].label else "")
        elif attempt > 1 and 0 <= position <= 100:
            text = str(attempt) if position - labeled >= 5 else ""
            labeled = position if text else labeled
            marks.append(Tick(position, text))
    return marks
