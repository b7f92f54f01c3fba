"""Collects the points of a curve, and limits their number. Imports NumPy, but neither torch nor Lightning."""

import math
from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankzero.runs.metrics.curves import Curve

MAX_POINTS = 1 << 14
"""Number of points above which a curve is downsampled; 25 curves then take 10 MB."""


class CurveBuilder:
    """Collects the points of a curve, in the order in which they were logged.

    Of several points with the same step, the one logged last remains. Whenever there are more than `MAX_POINTS`, only
    the first point of each interval of steps remains, and the length of these intervals doubles until half of the
    points are left. Curves that were logged at the same steps thus keep common steps. The last point remains as well.
    """

    def __init__(self) -> None:
        self._steps: array[Any] = array("q")
        self._times: array[Any] = array("d")
        self._values: array[Any] = array("d")
        self._interval = 1
        self._low, self._high, self._not_finite, self._count = math.inf, -math.inf, 0, 0
        self._reduced = 0
        """Number of points at the beginning that are counted already."""

    def add(self, step: int, seconds: float, value: float) -> None:
        """Adds a point that was logged `seconds` after 1970."""
        self._steps.append(step)
        self._times.append(seconds)
        self._values.append(value)
        if len(self._steps) > MAX_POINTS:
            self._reduce(MAX_POINTS // 2)

    def build(self) -> Curve:
        """Returns the curve."""
        is_downsampled = self._interval > 1
        self._reduce(MAX_POINTS)
        if not is_downsampled:
            return Curve(self._steps, self._times, self._values)
        if self._low > self._high:
            self._low = self._high = math.nan
        return Curve(*self._points, self._low, self._high, self._not_finite, self._count)

    @property
    def _points(self) -> tuple["array[Any]", "array[Any]", "array[Any]"]:
        return self._steps, self._times, self._values

    def _reduce(self, limit: int) -> None:
        """Counts the new points, sorts all of them by step, and downsamples them to at most `limit` points."""
        new = np.array(self._values[self._reduced :])
        finite = new[np.isfinite(new)]
        self._count += len(new)
        self._not_finite += len(new) - len(finite)
        self._low = min(self._low, finite.min(initial=math.inf))
        self._high = max(self._high, finite.max(initial=-math.inf))
        steps = np.array(self._steps)
        newest = _newest_by_step(steps)
        kept = newest[_first_of_intervals(steps[newest], self._interval)]
        while len(kept) > limit:
            self._interval *= 2
            kept = newest[_first_of_intervals(steps[newest], self._interval)]
        self._keep(kept)
        self._reduced = len(kept)

    def _keep(self, indices: NDArray[np.int64]) -> None:
        self._steps, self._times, self._values = (
            array(numbers.typecode, np.array(numbers)[indices].tobytes()) for numbers in self._points
        )


def _newest_by_step(steps: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the index of the last point with each step, by step."""
    _, from_end = np.unique(steps[::-1], return_index=True)
    return len(steps) - 1 - from_end


def _first_of_intervals(steps: NDArray[np.int64], interval: int) -> NDArray[np.bool_]:
    """Returns which of increasing steps are the first of an interval, or the last step."""
    kept = np.ones(len(steps), dtype=bool)
    kept[1:] = np.diff(steps // interval) > 0
    kept[-1:] = True
    return kept
