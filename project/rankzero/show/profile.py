"""Profiles some steps of an attempt: a trace for Perfetto or Chrome, and a table of the operators."""

import gzip
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import attrgetter
from pathlib import Path
from time import time_ns
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from rankzero.checkpoints.atomic_files import replacing, synced, write_text
from rankzero.distributed.monitoring.activity import DATA, UNMONITORED, VALIDATION, Activity
from rankzero.distributed.process.quiet import silenced_kineto
from rankzero.distributed.torch_inside import is_profiling
from rankzero.messages import RequestError, Stopped, print_error, print_line
from rankzero.runs.directory import RunDirectory
from rankzero.show.measurements.step_time import STEP_PHASES
from rankzero.training.fit_loop import fit_loop_of
from rankzero.training.hooks import LoopCallback


class Part(NamedTuple):
    """A part of a step, numbered from 1, on the main thread, in nanoseconds of `time.time_ns`."""

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

EXPLANATION = """\
The profiler makes steps slower, most of all those of small operators.

Units in the tables: us = 0.001 ms, ms, s. Times and calls are totals over all profiled steps.
Self time is the time of an operator without the operators that it calls.
ProfilerStep* is a whole step, and Optimizer.step#... often contains its forward and backward pass.
The self CPU time of these two is time outside of all operators, mostly Python."""


def write_trace(path: Path, recording: Recording) -> None:
    """Writes a compressed trace in Chrome's JSON format, atomically.

    Raises:
        OSError: A disk is full or cannot be written.
        RuntimeError: torch did not write a trace, or in an unknown format.
    """
    with tempfile.TemporaryDirectory(prefix="rankzero-profile-") as folder:
        uncompressed = Path(folder) / "trace.json"
        recording.profiler.export_chrome_trace(str(uncompressed))
        with uncompressed.open("rb") as trace:
            trace.seek(max(0, uncompressed.stat().st_size - 64))
            if not trace.read().rstrip().endswith(b"}"):  # torch reports no failed write
                raise OSError(f"torch could not write its trace to {Path(folder).parent}")
        with (
            uncompressed.open("rb") as source,
            replacing(path, f".{os.getpid()}") as temporary,
            synced(temporary) as file,
            # Level 9 takes several times as long, for a file that is a tenth smaller.
            gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=3) as compressed,
        ):
            header = source.read(2**20)  # longer than the header of the trace
            base = re.search(rb'"baseTimeNanoseconds": *([0-9]+)', header)
            events = re.search(rb'"traceEvents": *\[', header)
            if base is None or events is None:
                raise RuntimeError("torch wrote the trace in an unknown format")
            compressed.write(header[: events.end()])
            for event in track_of(recording.parts, int(base[1])):
                compressed.write(json.dumps(event).encode() + b",\n")
            compressed.write(header[events.end() :])
            shutil.copyfileobj(source, compressed)


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
    head = f"Mean time of each part of a step on the main thread (torch {torch.__version__}):"
    total = f"  {'total':<12}{sum(milliseconds.values()) / steps:12.3f} ms"
    return "\n".join([head, *rows, total, EXPLANATION])


@dataclass(frozen=True)
class ProfileRequest:
    """The values of `--profile` and `--profile_ranks`: which steps to profile, and on which ranks, in ascending order.

    `after` is the number of optimizer steps of the run after which to begin; None for the end of the warm-up.
    """

    steps: int
    after: int | None
    ranks: tuple[int, ...]

    @classmethod
    def read(cls, profile: str | None, ranks: str | None, world_size: int) -> "ProfileRequest | None":
        """Reads `--profile`, such as `10steps@200`, and `--profile_ranks`, such as `0,1` or `all`; None without flags.

        Raises:
            RequestError: The ranks do not exist, or nothing is to be profiled on them.
        """
        if profile is None:
            if ranks is None:
                return None
            found = "without --profile, no rank is profiled"
            raise RequestError(f"--profile_ranks {ranks}", found, f"--profile 10steps --profile_ranks {ranks}")
        steps, _, after = re.sub("steps?", "", profile).partition("@")
        chosen = range(world_size) if ranks == "all" else sorted({int(rank) for rank in (ranks or "0").split(",")})
        if chosen[-1] >= world_size:
            many = f"the run has {world_size} processes, ranks 0 to {world_size - 1}"
            found = many if world_size > 1 else "the run has one process, rank 0"
            existing = ",".join(str(rank) for rank in chosen if rank < world_size)
            raise RequestError(f"--profile_ranks {ranks}", found, f"--profile_ranks {existing or 'all'}")
        return cls(int(steps), int(after) if after else None, tuple(chosen))

    def __str__(self) -> str:
        """Returns the flag and its value, as the user would type them."""
        return f"--profile {self.steps}steps" + ("" if self.after is None else f"@{self.after}")


WARM_UP_STEPS = 5
"""Steps of an attempt that are never profiled, because they allocate memory, choose kernels and count operations."""


class Profile(LoopCallback):
    """Profiles some steps on the chosen ranks, and writes the trace and a table of the operators of each rank.

    Before the profiled steps, each step costs one call that compares two numbers; after them, nothing. Ranks that are
    not chosen do nothing. The recording ends early at a validation, which may be much longer than the steps.

    An error of the profiler is printed, and does not affect training.
    """

    def __init__(self, run: RunDirectory, request: ProfileRequest, activity: Activity) -> None:
        self.run, self.request, self._activity = run, request, activity
        self._is_pending = False
        self._recording: Recording | None = None
        self._begin_after = 0
        self._first: int | None = None
        self._last: int | None = None  # if the recording ended before training did
        self._end_reason = "training ended"

    def needs(self, hook: str) -> bool:
        return self._is_pending

    def on_ready(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._is_pending = trainer.global_rank in self.request.ranks
        self._begin_after = max(self.request.after or 0, trainer.global_step + WARM_UP_STEPS)

    def on_step_done(self, trainer: Trainer) -> None:
        step = trainer.global_step
        if self._first is not None:
            is_over = self._recording is None or self._recording.is_over
            if is_over or step >= self._first + self.request.steps:
                self._close(trainer)
        elif step >= self._begin_after - 1:
            with self._errors_printed():
                if self._recording is None:
                    self._recording = Recording(self._activity, trainer.strategy.root_device.type)
                if step >= self._begin_after:
                    self._first = step
                    self._activity.listen(self._enter)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close(trainer, warns_if_empty=isinstance(exception, Stopped))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close(trainer, warns_if_empty=False)

    def _enter(self, phase: str) -> None:
        """Records a phase; called when the main thread enters one."""
        recording = self._recording
        if recording is None or not (recording.has_begun or phase == DATA):
            return
        with self._errors_printed():
            if phase == VALIDATION:
                self._end_reason, self._last = "a validation began", fit_loop_of(self._trainer).epoch_loop.global_step
                self._stop()
            else:
                recording.enter(phase)

    def _stop(self) -> None:
        """Stops the profiler, which keeps what it has recorded."""
        self._activity.stop_listening(self._enter)
        if self._recording is not None:
            self._recording.end()

    def _close(self, trainer: Trainer, warns_if_empty: bool = True) -> None:
        """Ends the recording and writes its files; does nothing if that is done, or if this rank is not profiled."""
        if not self._is_pending:
            return
        with self._errors_printed():
            self._stop()
            self._finish()
            recording, self._recording = self._recording, None
            if recording is not None and recording.has_begun:
                self._write(recording, trainer)
            elif warns_if_empty and trainer.global_rank == self.request.ranks[0]:
                reason = f"training ended after step {trainer.global_step}, and profiling begins after step"
                print_error(f"nothing was profiled ({self.request}): {reason} {self._begin_after}")

    def _finish(self) -> None:
        """Removes the callback from the steps that follow."""
        self._is_pending = False
        fit_loop_of(self._trainer).epoch_loop.subscribers.remove("on_step_done", self)

    def _write(self, recording: Recording, trainer: Trainer) -> None:
        rank, ranks = trainer.global_rank, self.request.ranks
        steps = self._steps_text(trainer.global_step if self._last is None else self._last)
        folder = self.run.path / "profile" / f"attempt-{self.run.attempt:04d}"
        trace, table = folder / f"rank-{rank:03d}.json.gz", folder / f"rank-{rank:03d}.txt"
        write_table(table, recording, f"Run {self.run.name}, attempt {self.run.attempt}, rank {rank}: {steps}")
        write_trace(trace, recording)
        line = f"profiled {steps}: {trace} (open it at https://ui.perfetto.dev or chrome://tracing), {table}"
        logging.getLogger("rankzero").info(line)
        if rank == ranks[0]:
            count = len(ranks) - 1
            others = f", and those of {count} more rank{'s' * (count > 1)}" if count else ""
            print_line(f"rankzero: {line}{others}")

    def _steps_text(self, last: int) -> str:
        """Returns the description of the profiled steps, up to the last complete one."""
        assert self._first is not None
        count = last - self._first
        if count >= self.request.steps:
            return f"steps {self._first + 1} to {last}"
        reason = f"because {self._end_reason} after step {last}"
        return f"{count} of {self.request.steps} steps, from step {self._first + 1}, {reason}"

    @contextmanager
    def _errors_printed(self) -> Iterator[None]:
        """Prints an error as a warning, and ends the profile: no error of the profiler ends training."""
        try:
            yield
        except Exception as error:
            with suppress(Exception):
                self._stop()
            self._recording = None
            self._finish()
            reason = str(error) or repr(error)
            line = f"the profile could not be written ({self.request}), training is not affected: {reason}"
            logging.getLogger("rankzero").warning(line)
            print_error(line)
