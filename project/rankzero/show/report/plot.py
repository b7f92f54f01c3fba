"""Geometry of charts: scales, ticks, reduced curves, SVG paths and colors. Does not import torch."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from typing import NamedTuple

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#F0E442")
"""The palette of Okabe and Ito, which color-blind people can distinguish; yellow, the faintest on white, comes last."""

BRIGHT_COLORS = COLORS[:6]
"""The palette without black, the color of texts, and without yellow."""


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
        values, step = (
            _log_values(self.low, self.high, count) if self.is_log else round_values(self.low, self.high, count)
        )
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
