"""Chooses the charts of a report from the curves of a run, and computes their geometry. Does not import torch."""

import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from operator import itemgetter
from statistics import fmean, median
from typing import NamedTuple

from rankzero.show.report.curves import BRIGHT_COLORS, EPOCH, SAMPLES, SERIES, STEP_PARTS, Curve
from rankzero.text import GROUPS, number_text

WIDTH, HEIGHT = 1000, 400
"""Size of the coordinate system of a chart; the page stretches it to the width of the screen."""

MAX_POINTS = 1000
"""Longer curves are reduced to about this number of points, which is more than a screen shows."""


class Tick(NamedTuple):
    """A tick at `position` percent of an axis."""

    position: float
    label: str


@dataclass(frozen=True)
class Scale:
    """Maps values to positions: `low` to 0 and `high` to 1."""

    low: float
    high: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        low, high = (math.log(self.low), math.log(self.high)) if self.is_log else (self.low, self.high)
        return ((math.log(value) if self.is_log else value) - low) / (high - low)

    def ticks(self, count: int = 5) -> list[Tick]:
        """Returns about `count` ticks at round values."""
        round_or_log_values = _log_values if self.is_log else round_values
        values, step = round_or_log_values(self.low, self.high, count)
        return [Tick(round(100 * self(value), 2), label(value, step)) for value in values]


def value_scale(values: Sequence[float], from_zero: bool, may_be_log: bool) -> Scale:
    """Returns a scale for all finite values of a chart, with a margin.

    With `may_be_log`, the scale is logarithmic if the values differ by a factor of 50 or more.
    """
    low, high = min(values), max(values)
    if may_be_log and low > 0 and high / low >= 50:
        margin = (high / low) ** 0.04
        return Scale(low / margin, high * margin, True)
    if from_zero and low >= 0:
        return Scale(0.0, high * 1.06 or 1.0)
    margin = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return Scale(low - margin, high + margin)


def step_scale(steps: Sequence[int]) -> Scale:
    """Returns the scale of the horizontal axis, which begins at zero unless the first step is far from it."""
    low, high = min(steps), max(steps)
    low = low if low > 0.3 * high else 0
    return Scale(low, high if high > low else low + 1)


def reduced(values: Sequence[float]) -> list[int]:
    """Returns the points to draw, by index: first, last and extreme values, and gaps at values that are not finite."""
    count = len(values)
    if count <= MAX_POINTS:
        return list(range(count))
    kept = {0, count - 1}
    size = math.ceil(count / (MAX_POINTS // 2))
    for start in range(0, count, size):
        bucket = range(start, min(start + size, count))
        finite = [index for index in bucket if math.isfinite(values[index])]
        if finite:
            kept |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
        if len(finite) < len(bucket):
            kept.add(next(index for index in bucket if not math.isfinite(values[index])))
    return sorted(kept)


def paths(steps: Sequence[int], values: Sequence[float], x: Scale, y: Scale) -> list[str]:
    """Returns the points of one polyline for each part of a curve without gaps."""
    parts = groupby(zip(steps, values, strict=True), key=lambda point: math.isfinite(point[1]))
    polylines = [[_point(x(step), y(value)) for step, value in part] for is_finite, part in parts if is_finite]
    return [" ".join(points * 2 if len(points) == 1 else points) for points in polylines]  # one point draws no line


def areas(steps: Sequence[int], layers: Sequence[Sequence[float]], x: Scale, y: Scale) -> list[str]:
    """Returns the points of one polygon for each layer; each layer lies on the one before."""
    sums = [[0.0] * len(steps)]
    for layer in layers:
        sums.append([below + value for below, value in zip(sums[-1], layer, strict=True)])
    edges = [[_point(x(step), y(value)) for step, value in zip(steps, values, strict=True)] for values in sums]
    return [" ".join([*upper, *reversed(lower)]) for lower, upper in pairwise(edges)]


def mapped_ticks(steps: Sequence[int], values: Sequence[float], x: Scale) -> list[Tick]:
    """Returns ticks for another quantity on the axis of steps, such as samples; empty if it does not grow."""
    known: list[tuple[float, float]] = []
    for step, value in zip(steps, values, strict=True):
        if math.isfinite(value) and (not known or value > known[-1][1]):
            known.append((step, value))
    if len(known) < 2:
        return []
    low, high = (interpolated(known, end) for end in (x.low, x.high))
    swapped = [(value, step) for step, value in known]
    ticks, distance = round_values(max(low, 0.0), high)
    return [Tick(round(100 * x(interpolated(swapped, tick)), 2), label(tick, distance)) for tick in ticks]


def interpolated(known: Sequence[tuple[float, float]], at: float) -> float:
    """Interpolates between known points, which are sorted; beyond them, the line through the nearest two continues."""
    index = min(max(bisect_left(known, at, key=itemgetter(0)), 1), len(known) - 1)
    (x0, y0), (x1, y1) = known[index - 1], known[index]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


def round_values(low: float, high: float, count: int = 5) -> tuple[list[float], float]:
    """Returns about `count` round values from `low` to `high`, and the distance between them."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((factor * power for factor in (1, 2, 5, 10)), key=lambda size: abs(math.log(size / rough)))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)], step


def _log_values(low: float, high: float, count: int) -> tuple[list[float], float]:
    values: list[float] = []
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 3), (1, 2, 5)):
        if len(values) < 3:
            multiples = (factor * 10.0**exponent for exponent in exponents for factor in factors)
            values = [value for value in multiples if low <= value <= high]
    return values[:: math.ceil(len(values) / (count + 1))], 0.0


def label(value: float, step: float) -> str:
    """Returns the text of a tick.

    The distance to the next tick, `step`, determines the number of decimals; it is 0 on a logarithmic scale.
    """
    if abs(value) < step * 1e-6:
        return "0"
    for unit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 10 * unit or (abs(value) >= unit and (suffix != "k" or step >= unit)):
            return f"{value / unit:.6g}{suffix}"
    if max(abs(value), step) < 1e-3:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    if not step:
        return f"{value:g}"
    return f"{value:.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


def _point(x: float, y: float) -> str:
    return f"{WIDTH * x:.1f},{HEIGHT * (1 - y):.1f}"


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
    """One curve of a chart: its name (empty if it is the title), color, polylines, last, lowest and highest value."""

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
    if not (shown := [curve for tag, curve in curves.items() if not tag.startswith("x_axis/")]):
        return charts
    x = step_scale([step for curve in shown for step in (curve.steps[0], curve.steps[-1])])
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
    y = value_scale(bounds or [0.0, 1.0], bool(unit), may_be_log)
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
    kept = reduced(curve.values)
    polylines = paths([curve.steps[index] for index in kept], [curve.values[index] for index in kept], x, y)
    last, low, high = map(number_text, (curve.values[-1], curve.low, curve.high))
    return Line(name, color, polylines, len(kept) <= 40, last, low, high)


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
    y = value_scale([sum(column) for column in zip(*layers, strict=True)], True, False)
    polygons = areas(middles, layers, x, y)
    shown = []
    for tag, points, mean in zip(parts, polygons, means, strict=True):
        color, percent = BRIGHT_COLORS[list(STEP_PARTS).index(tag)], round(100 * mean / total, 1)
        shown.append(Area(STEP_PARTS[tag].title, color, points, number_text(mean), percent))
    return Chart(f"{number_text(total)} ms per step", "ms per step", y.ticks(), areas=shown)


def _mean(values: Mapping[int, float], steps: Sequence[int], weights: Mapping[int, int]) -> float:
    """Returns the weighted mean of the values at these steps."""
    return sum(values[step] * weights[step] for step in steps) / sum(weights[step] for step in steps)


def _slowest(group: Mapping[str, Curve]) -> dict[str, Curve]:
    """Returns the curves of a few ranks: all, or the slowest ones, and the median of all ranks."""
    if len(group) <= MAX_LINES:
        return dict(group)
    finite = {name: [value for value in curve.values if math.isfinite(value)] for name, curve in group.items()}
    slowest = sorted(finite, key=lambda name: -fmean(finite[name] or [0.0]))[: MAX_LINES - 1]
    by_step: dict[int, list[float]] = {}
    for curve in group.values():
        for step, value in zip(curve.steps, curve.values, strict=True):
            by_step.setdefault(step, []).append(value)
    middle = Curve(sorted(by_step), [], [median(by_step[step]) for step in sorted(by_step)])
    return {f"median of {len(group)} ranks": middle, **{name: group[name] for name in slowest}}


def _axes(curves: Mapping[str, Curve], x: Scale) -> list[tuple[str, list[Tick]]]:
    known = [(SERIES[tag].title, curves[tag]) for tag in (SAMPLES, EPOCH) if tag in curves]
    axes = [("steps", x.ticks()), *((name, mapped_ticks(curve.steps, curve.values, x)) for name, curve in known)]
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
