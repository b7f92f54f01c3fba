"""Records steps with torch's profiler, and writes a trace for Perfetto or Chrome and a table of the operators."""

import gzip
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from itertools import groupby, pairwise
from operator import attrgetter
from pathlib import Path
from time import time_ns
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from rankzero.distributed.monitoring.activity import DATA, UNMONITORED, VALIDATION, Activity
from rankzero.distributed.process.quiet import silenced_kineto
from rankzero.distributed.torch_inside import is_profiling
from rankzero.runs.checkpoints.atomic_files import replacing, synced, write_text
from rankzero.tracking.measurements.step_time import STEP_PHASES


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

    Raises:
        RuntimeError: torch's profiler is already in use.
    """

    def __init__(self, activity: Activity, device: str) -> None:
        _check_unused()
        self._activity = activity
        self.has_cuda = device == "cuda"
        self.has_begun = self.is_over = False
        self._entered: list[tuple[int, int, str]] = []
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.has_cuda else [])]
        actions = ProfilerAction.WARMUP, ProfilerAction.RECORD
        self.profiler = profile(activities=activities, schedule=lambda step: actions[step > 0])
        with silenced_kineto(not self.has_cuda):
            self.profiler.start()

    def enter(self, phase: str) -> None:
        """Records that the main thread enters a phase; begins to record with the first step.

        Raises:
            RuntimeError: torch's profiler is in use.
        """
        step = self._activity.step + 1
        if phase == DATA and (not self._entered or self._entered[-1][0] != step):
            if not self.has_begun:
                _check_unused()
            self.profiler.step_num = step - 1
            self.profiler.step()
            self.has_begun = True
        self._entered.append((step, time_ns(), phase))

    def end(self) -> None:
        """Stops torch's profiler; does nothing if that is done."""
        if not self.is_over and (self.has_begun or not is_profiling()):
            self._entered.append((self._activity.step + 1, time_ns(), ""))
            self.is_over = True
            self.profiler.stop()

    @property
    def parts(self) -> Iterator[Part]:
        """The parts of all steps in order."""
        for (step, begin, phase), (_, end, _) in pairwise(self._entered):
            if phase not in UNMONITORED:
                yield Part(step, phase, begin, end)


def _check_unused() -> None:
    """Raises an error if a profiler is running; torch (2.15) would silently cancel it."""
    if is_profiling():
        raise RuntimeError("another profiler of torch is running")


OPERATORS = 20
"""Number of operators in a table."""

TRACK = "Parts of a step (Rankzero)"

_GZIP_LEVEL = 3
"""Level 9 takes several times as long, for a file that is a tenth smaller."""


def write_trace(path: Path, recording: Recording) -> None:
    """Writes a compressed trace in Chrome's JSON format, atomically.

    Raises:
        OSError: A disk is full or cannot be written.
        RuntimeError: torch did not write a trace, or in an unknown format.
    """
    with tempfile.TemporaryDirectory(prefix="rankzero-profile-") as folder:
        uncompressed = Path(folder) / "trace.json"
        recording.profiler.export_chrome_trace(str(uncompressed))
        trace = uncompressed.read_bytes()
        if not trace.rstrip().endswith(b"}"):  # torch reports no failed write
            raise OSError(f"torch could not write its trace to {Path(folder).parent}")
    base = re.search(rb'"baseTimeNanoseconds": *([0-9]+)', trace)
    header, begin, events = trace.partition(b'"traceEvents": [')
    if base is None or not begin:
        raise RuntimeError("torch wrote the trace in an unknown format")
    track = b"".join(json.dumps(event).encode() + b",\n" for event in track_of(recording.parts, int(base[1])))
    with replacing(path, f".{os.getpid()}") as temporary, synced(temporary) as file:
        file.write(gzip.compress(header + begin + track + events, _GZIP_LEVEL))


def track_of(parts: Iterable[Part], base: int) -> Iterable[dict[str, Any]]:
    """Yields the events of a track that shows the steps and their parts."""
    track = {"pid": os.getpid(), "tid": TRACK}
    for name, argument in (("thread_name", {"name": TRACK}), ("thread_sort_index", {"sort_index": -1})):
        yield {"ph": "M", "name": name, **track, "args": argument}
    for step, group in groupby(parts, attrgetter("step")):
        step_parts = list(group)
        # Viewers round times, and drop ranges that overlap by a nanosecond without being nested.
        events = [(f"step {step}", step_parts[0].begin, step_parts[-1].end - 2)]
        events += [(part.phase, part.begin, part.end - 4) for part in step_parts]
        for name, begin, end in events:
            times = {"ts": (begin - base) / 1000, "dur": max(0, end - begin) / 1000}
            yield {"ph": "X", "cat": "rankzero", "name": name, **track, **times, "args": {"step": step}}


def write_table(path: Path, recording: Recording, title: str) -> None:
    """Writes the operators that took the longest as a text, atomically.

    Raises:
        OSError: A disk is full or cannot be written.
    """
    operators = recording.profiler.key_averages()
    sections = [f"{title}\n\n{_summary(recording)}"]
    for unit, key in (("CPU", "self_cpu_time_total"), ("CUDA", "self_device_time_total")):
        if unit == "CPU" or recording.has_cuda:
            table = operators.table(sort_by=key, row_limit=OPERATORS, max_name_column_width=80)
            lines = [f"The {OPERATORS} operators with the most self {unit} time:", *table.splitlines()]
            sections.append("\n".join(map(str.rstrip, lines)).rstrip())
    write_text(path, "\n\n".join(sections) + "\n")


def _summary(recording: Recording) -> str:
    """Returns the mean time of each part of a step, and the meaning of the tables."""
    milliseconds = dict.fromkeys(STEP_PHASES.values(), 0.0)
    for part in recording.parts:
        if part.phase != VALIDATION:
            milliseconds[STEP_PHASES.get(part.phase, "other")] += 1e-6 * (part.end - part.begin)
    steps = max(1, len({part.step for part in recording.parts}))
    rows = [f"  {name.replace('_', ' '):<12}{value / steps:12.3f} ms" for name, value in milliseconds.items()]
    return "\n".join(
        [
            f"Mean time of each part of a step on the main thread (torch {torch.__version__}):",
            *rows,
            f"  {'total':<12}{sum(milliseconds.values()) / steps:12.3f} ms",
            "The profiler makes steps slower, most of all those of small operators.",
            "",
            "Units in the tables: us = 0.001 ms, ms, s. Times and calls are totals over all profiled steps.",
            "Self time is the time of an operator without the operators that it calls.",
            "ProfilerStep* is a whole step, and Optimizer.step#... often contains its forward and backward pass.",
            "The self CPU time of these two is time outside of all operators, mostly Python.",
        ]
    )
