"""Records steps with torch's profiler, and the parts of each step."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import pairwise
from time import time_ns
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, kineto_available, profile, record_function

from rankzero.distributed.monitoring.activity import DATA, UNMONITORED, Activity
from rankzero.distributed.process.quiet import silenced_kineto


class Part(NamedTuple):
    """A part of a step on the main thread.

    Args:
        step: Number of the step, from 1.
        phase: Phase of `Activity`.
        begin: Nanoseconds since the epoch of `time.time_ns`.
        end: Likewise.
    """

    step: int
    phase: str
    begin: int
    end: int


class Recording:
    """Records operators with torch's profiler from the beginning of a step on.

    The parts of a step are not recorded with `record_function`: torch's own range around `optimizer.step()` contains
    the forward and the backward pass, and would overlap with these parts. Viewers drop ranges of one thread that
    overlap without being nested. The parts are recorded with their times instead, for a track of their own. A step has
    a range of torch's profiler, named as tools for its traces expect it: `ProfilerStep#7`.

    Args:
        activity: What the main thread is doing.
        device: Type of this rank's device, such as `cuda`.

    Attributes:
        has_begun: Whether recording has begun.
        is_over: Whether recording has ended.

    Raises:
        RuntimeError: torch's profiler is not available or already in use.
    """

    def __init__(self, activity: Activity, device: str) -> None:
        if not kineto_available():
            raise RuntimeError("this build of torch has no Kineto")
        _check_unused()
        self._activity = activity
        self.has_cuda = device == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.has_cuda else [])]
        self.profiler = profile(activities=activities)
        self.has_begun = self.is_over = False
        self._step_range: AbstractContextManager[object] | None = None
        self._entered: list[tuple[int, int, str]] = []
        with silenced_kineto(not self.has_cuda):
            self.profiler.prepare_trace()

    def begin(self) -> None:
        """Begins to record; called at the beginning of a step.

        Raises:
            RuntimeError: torch's profiler is in use.
        """
        _check_unused()
        self.profiler.start_trace()
        self.has_begun = True

    def enter(self, phase: str) -> None:
        """Records that the main thread enters a phase."""
        step = self._activity.step + 1
        if phase == DATA and (not self._entered or self._entered[-1][0] != step):
            self._end_step()
            self._step_range = record_function(f"ProfilerStep#{step}")
            self._step_range.__enter__()
        self._entered.append((step, time_ns(), phase))

    def end(self) -> None:
        """Stops torch's profiler; does nothing if that is done."""
        if self.is_over:
            return
        self.is_over = True
        if not self.has_begun:
            if not torch._C._autograd._profiler_enabled():  # as torch ends a warm-up that no recording follows
                self.profiler.start_trace()
                self.profiler.stop_trace()
            return
        self._entered.append((self._activity.step + 1, time_ns(), ""))
        try:
            self._end_step()
        finally:
            self.profiler.stop_trace()

    def _end_step(self) -> None:
        step_range, self._step_range = self._step_range, None
        if step_range is not None:
            step_range.__exit__(None, None, None)

    @property
    def parts(self) -> Iterator[Part]:
        """The parts of all steps in order."""
        for (step, begin, phase), (_, end, _) in pairwise(self._entered):
            if phase not in UNMONITORED:
                yield Part(step, phase, begin, end)


def _check_unused() -> None:
    """Raises an error if a profiler is running; torch (2.15) would silently cancel it."""
    if torch._C._autograd._profiler_enabled():
        raise RuntimeError("another profiler of torch is running")
