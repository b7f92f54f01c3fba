"""The series that Rankzero logs for every model, and the curves of a run. Does not import torch."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rankzero.runs.metrics_file import Row, read_rows


class Series(NamedTuple):
    """A series of values.

    Args:
        title: Title of its chart, or name of its layer in the chart of the parts of a step.
        description: What the values are, with their unit.
        reduction: How the values of ranks are combined: `mean`, `sum` or `max`. Empty for values of rank zero.
    """

    title: str
    description: str
    reduction: str = ""


FIRST_GRADIENT = "world/first_gradient_ms"
DATA_WAIT = "wall_time/data_wait_ms"
GRADIENT_NORM = "weights/gradient_norm"
MFU = "workload/mfu_percent"
EPOCH, SAMPLES = "x_axis/epoch", "x_axis/samples"

PREFIX = "rankzero/"
"""Prefix of the tags in a user's logger, so that they differ from all tags of the user."""

STEP_PARTS = {
    f"wall_time/{name}_ms": Series(title, f"Milliseconds per step: {content}", "mean")
    for name, title, content in (
        ("data_wait", "waiting for data", "waiting for a batch and moving it to the device"),
        ("forward", "forward pass", "forward pass"),
        ("backward", "backward pass", "backward pass, without exposed communication"),
        ("exposed_communication", "communication", "waiting for gradients of other ranks after the backward pass"),
        ("optimizer", "optimizer", "optimizer"),
        ("other", "other", "hooks, callbacks, logging"),
    )
}
"""The parts of a step, from the bottom of the chart."""

# fmt: off
SERIES = {
    "train/loss": Series("loss", "Mean loss of all samples of the interval, over all ranks"),
    "train/lr": Series("learning rate", "Learning rate"),
    "train/samples_per_second": Series("speed", "Training samples per second over all ranks, without validation"),
    **STEP_PARTS,
    "wall_time/step_ms": Series("step", "Milliseconds per step, without validation and checkpoints", "mean"),
    "wall_time/checkpoint_blocked_s":
        Series("training blocked by saves", "Seconds of the interval in which saving blocked training", "max"),
    "wall_time/checkpoint_s":
        Series("time to save a checkpoint", "Seconds from the copy of the last checkpoint until it was on disk"),
    GRADIENT_NORM:
        Series("gradient norm", "2-norm of all gradients before clipping, in the last step of the interval", "max"),
    "workload/samples_per_second_per_device":
        Series("speed per device", "Training samples per second and device, without validation"),
    "workload/teraflops_per_second":
        Series("compute speed per device",
               "TFLOP/s of a device: 10^12 floating-point operations of forward and backward passes per second"),
    MFU: Series("model FLOP/s utilization", "Model FLOP/s utilization: percentage of the published peak of the device"),
    "workload/device_memory_gib":
        Series("device memory", "GiB of device memory in use, largest amount since the start", "max"),
    "workload/host_memory_gib":
        Series("host memory of a rank", "GiB of host memory of a rank's process; the largest of all ranks", "max"),
    "workload/loader_queue_batches":
        Series("prepared batches of a rank", "Batches that the loader processes of a rank hold ready", "mean"),
    "workload/checkpoint_mib": Series("checkpoint size", "MiB of the last checkpoint"),
    FIRST_GRADIENT:
        Series("time to the first gradient", "Milliseconds from the start of a step to its first gradient, by rank",
               "max"),
    "world/data_wait_ms": Series("waiting for data", "Milliseconds per step: waiting for a batch, by rank"),
    EPOCH: Series("epochs", "Epochs that are done, with the fraction of the current one"),
    SAMPLES: Series("samples", "Training samples of all attempts and ranks"),
    "x_axis/attempt": Series("attempt", "Number of the attempt, from 1"),
}
# fmt: on
"""Tag -> series. TensorBoard shows the groups in alphabetical order, those of the model (`train`, `val`) first."""


COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#F0E442")
"""The palette of Okabe and Ito, which color-blind people can distinguish; yellow, the faintest on white, comes last."""

BRIGHT_COLORS = COLORS[:6]
"""The palette without black, the color of texts, and without yellow."""

MAX_POINTS = 1 << 12
"""Number of points above which a curve is downsampled."""


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
        epochs: Number of epochs at each point, with a fraction; NaN if unknown.
        samples: Number of samples of the run at each point; NaN if unknown.
    """

    steps: Sequence[int] = field(default_factory=list)
    times: Sequence[float] = field(default_factory=list)
    values: Sequence[float] = field(default_factory=list)
    low: float = math.nan
    high: float = math.nan
    not_finite: int = 0
    count: int = 0
    epochs: Sequence[float] = ()
    samples: Sequence[float] = ()

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


class CurveBuilder:
    """Collects the points of a curve.

    Of several points with the same step, the one added last remains. Whenever there are more than `MAX_POINTS`, only
    the first point of each interval of steps remains, and the length of these intervals doubles until half of the
    points are left. Curves that were logged at the same steps thus keep common steps. The last point remains as well.
    """

    def __init__(self) -> None:
        self._points: dict[int, tuple[float, Row]] = {}
        self._interval, self._count, self._not_finite = 1, 0, 0
        self._low, self._high = math.inf, -math.inf

    def add(self, row: Row, value: float) -> None:
        """Adds a value of a row."""
        self._count += 1
        if math.isfinite(value):
            self._low, self._high = min(self._low, value), max(self._high, value)
        else:
            self._not_finite += 1
        self._points[row.step] = value, row
        if len(self._points) > MAX_POINTS:
            steps = sorted(self._points)
            while len(kept := self._firsts(steps)) > MAX_POINTS // 2:
                self._interval *= 2
            self._points = {step: self._points[step] for step in kept}

    def _firsts(self, steps: list[int]) -> list[int]:
        """Returns the first of increasing steps in each interval, and the last step."""
        firsts = {step // self._interval: step for step in reversed(steps)}
        return sorted({*firsts.values(), steps[-1]})

    def build(self) -> Curve:
        """Returns the curve."""
        steps = self._firsts(sorted(self._points)) if self._points else []
        values, rows = [self._points[step][0] for step in steps], [self._points[step][1] for step in steps]
        curve = Curve(steps, [row.seconds for row in rows], values)
        curve.epochs = [math.nan if row.epoch is None else row.epoch for row in rows]
        curve.samples = [math.nan if row.samples is None else row.samples for row in rows]
        if self._interval > 1:
            curve.low, curve.high = (self._low, self._high) if self._low <= self._high else (math.nan, math.nan)
            curve.not_finite, curve.count = self._not_finite, self._count
        return curve


def read_curves(run: Path) -> dict[str, Curve]:
    """Returns the curves of a run by tag; {} if nothing was logged.

    Long curves are downsampled, so that memory does not grow with the length of the run.
    """
    builders: defaultdict[str, CurveBuilder] = defaultdict(CurveBuilder)
    for row in read_rows(run):
        for tag, number in row.values.items():
            builders[tag].add(row, number)
    return {tag: builder.build() for tag, builder in sorted(builders.items())}
