"""Profiles some steps of an attempt."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from lightning.pytorch import LightningModule, Trainer

from rankzero.distributed.monitoring.activity import DATA, VALIDATION, Activity
from rankzero.messages import RequestError, Stopped, print_error, print_line
from rankzero.runs.directory import RunDirectory
from rankzero.tracking.profiling.recording import Recording, write_table, write_trace
from rankzero.training.fit_loop import fit_loop_of
from rankzero.training.hooks import LoopCallback, Subscribers


@dataclass(frozen=True)
class ProfileRequest:
    """The values of `--profile` and `--profile_ranks`.

    Args:
        steps: Number of optimizer steps to profile.
        after: Number of optimizer steps of the run after which to begin; None for the end of the warm-up.
        ranks: Ranks to profile, in ascending order.
    """

    steps: int
    after: int | None
    ranks: tuple[int, ...]

    @classmethod
    def read(cls, profile: str | None, ranks: str | None, world_size: int) -> "ProfileRequest | None":
        """Returns the request, or None if nothing is to be profiled.

        Args:
            profile: Value of `--profile`, such as `10steps@200`; None without the flag.
            ranks: Value of `--profile_ranks`, such as `0,1` or `all`; None without the flag.
            world_size: Number of processes.

        Raises:
            RequestError: The ranks do not exist, or nothing is to be profiled on them.
        """
        if profile is None:
            if ranks is None:
                return None
            found = "without --profile, no rank is profiled"
            raise RequestError(f"--profile_ranks {ranks}", found, f"--profile 10steps --profile_ranks {ranks}")
        match = re.fullmatch(r"([0-9]+)steps?(?:@([0-9]+))?", profile)
        assert match, profile
        chosen = range(world_size) if ranks == "all" else sorted({int(rank) for rank in (ranks or "0").split(",")})
        if chosen[-1] >= world_size:
            found = f"the run has {world_size} processes, ranks 0 to {world_size - 1}"
            found = found if world_size > 1 else "the run has one process, rank 0"
            existing = ",".join(str(rank) for rank in chosen if rank < world_size)
            raise RequestError(f"--profile_ranks {ranks}", found, f"--profile_ranks {existing or 'all'}")
        return cls(int(match[1]), int(match[2]) if match[2] else None, tuple(chosen))

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
        self._subscribers: Subscribers | None = None
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
        self._subscribers = fit_loop_of(trainer).epoch_loop.subscribers

    def on_step_done(self, trainer: Trainer) -> None:
        step = trainer.global_step
        if step < self._begin_after - 1:
            return
        if self._first is not None:
            is_over = self._recording is None or self._recording.is_over
            if is_over or step >= self._first + self.request.steps:
                self._close(trainer)
            return
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
                return
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
        if self._subscribers is not None:
            self._subscribers.remove("on_step_done", self)

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
