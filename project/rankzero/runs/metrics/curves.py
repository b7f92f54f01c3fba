"""Reads the curves of a run from `metrics.jsonl`. Does not import torch."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rankzero.runs.metrics.metrics_file import METRICS_FILE, read_rows


@dataclass
class Curve:
    """The values of one tag, with strictly increasing steps. A long curve is downsampled, see `CurveBuilder`.

    Attributes:
        steps: Step of each point.
        times: Time at which each point was logged, in seconds since 1970.
        values: The values, which may be NaN or infinite.
        low: Lowest finite value that was logged, also if it is not among the points; NaN without one.
        high: Highest finite value that was logged; NaN without one.
        not_finite: Number of logged values that are NaN or infinite.
        count: Number of logged values.
    """

    steps: Sequence[int] = field(default_factory=list)
    times: Sequence[float] = field(default_factory=list)
    values: Sequence[float] = field(default_factory=list)
    low: float = math.nan
    high: float = math.nan
    not_finite: int = 0
    count: int = 0

    def __post_init__(self) -> None:
        if not self.count:
            finite = [value for value in self.values if math.isfinite(value)]
            self.low, self.high = min(finite, default=math.nan), max(finite, default=math.nan)
            self.count = len(self.values)
            self.not_finite = self.count - len(finite)

    @property
    def is_downsampled(self) -> bool:
        """Whether some logged values are not among the points."""
        return self.count > len(self.values)


def read_curves(run: Path) -> dict[str, Curve]:
    """Returns the curves of a run by tag; {} if nothing was logged.

    Long curves are downsampled, so that memory does not grow with the length of the run.
    """
    if not (run / METRICS_FILE).exists():
        return {}
    from rankzero.runs.metrics.curve_builder import CurveBuilder  # imports NumPy, in a tenth of a second

    builders: defaultdict[str, CurveBuilder] = defaultdict(CurveBuilder)
    for row in read_rows(run):
        for tag, number in row.values.items():
            builders[tag].add(row.step, row.seconds, number)
    return {tag: builder.build() for tag, builder in sorted(builders.items())}
