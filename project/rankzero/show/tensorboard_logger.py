"""Writes `metrics.jsonl` and TensorBoard's files; survives a full disk, a deleted folder and other write errors."""

import itertools
import threading
import time
from argparse import Namespace
from collections import ChainMap, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyExperiment, rank_zero_experiment
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn

from rankzero.runs.directory import RunDirectory
from rankzero.runs.metrics_file import METRICS_FILE, Row, append_rows, cut_rows
from rankzero.runs.secrets import without_secrets

RETRY_SECONDS = 30.0
MAX_QUEUED_CALLS = 100_000
FLUSH_SECONDS = 2.0
"""Seconds between two writes: handing a value to the writer's thread costs more than a step of a small model."""


@contextmanager
def without_files(trainer: Trainer) -> Iterator[None]:
    """Makes the run's own logger write nothing within the block, in which the run has not begun."""
    own_loggers = [logger for logger in trainer.loggers if isinstance(logger, DurableTensorBoardLogger)]
    for logger in own_loggers:
        logger.is_muted = True
    try:
        yield
    finally:
        for logger in own_loggers:
            logger.is_muted = False


def _report_unless_of_writer(hook: Callable[[Any], object], error: Any) -> None:
    """Hook for errors of threads: a write error of TensorBoard's thread is raised again by the logger's next call."""
    if type(error.thread).__name__ != "_AsyncWriterThread" or not isinstance(error.exc_value, OSError):
        hook(error)


class DurableTensorBoardLogger(TensorBoardLogger):
    """Lightning's TensorBoard logger, which also appends each row of values to `metrics.jsonl` (tensorboard 2.21).

    A full disk or a deleted folder does not end the run. TensorBoard's writer thread ends at its first error, and every
    later call raises this error again. This logger tries a new writer every `RETRY_SECONDS`, and keeps the newest
    `MAX_QUEUED_CALLS` rows in memory until a write succeeds. If TensorBoard's file was deleted, it begins a new one at
    the next write.

    Attributes:
        descriptions: Tag -> description of the series, which TensorBoard shows.
        position: Returns the current epoch, with a fraction, and the current number of samples, which a row states.
        awaited_step: Step for which another row will follow; its rows are written together.
        is_muted: Whether the logger writes nothing now.
    """

    def __init__(self, run: RunDirectory) -> None:
        super().__init__(run.path, name="", version=0, default_hp_metric=False)
        if getattr(threading.excepthook, "func", None) is not _report_unless_of_writer:
            threading.excepthook = partial(_report_unless_of_writer, threading.excepthook)
        self.run = run
        self.descriptions: dict[str, str] = {}
        self.position: Callable[[], tuple[float, int]] | None = None
        self.awaited_step: int | None = None
        self._interval: tuple[int, tuple[float, int]] | None = None
        self._described: set[str] = set()
        self._flushed_at = 0.0
        self._retry_at: dict[str, float] = {}
        """File that cannot be written now -> when to try again."""
        self.is_muted = self._is_unsynced = False
        self._purge_step: int | None = None
        self._cut: tuple[int, int] | None = None  # the arguments of `cut_rows`, until it has succeeded
        self._purge_here: int | None = None  # the `purge_step` of the current file
        self._purge_file: Path | None = None
        self._file: Path | None = None  # of `_experiment`
        self._queued: deque[Row] = deque(maxlen=MAX_QUEUED_CALLS)
        self._rows: deque[Row] = deque(maxlen=MAX_QUEUED_CALLS)
        """`_queued`: rows that TensorBoard's files lack; `_rows`: rows that `metrics.jsonl` lacks."""

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        if self.is_muted:
            return DummyExperiment()
        self.run.claim()  # otherwise `fit` would find the writer's files, and choose another directory
        if self._experiment is not None and self._experiment.file_writer is None:  # user code has closed it
            self._leave_file()
        if self._experiment is None:
            from torch.utils.tensorboard import SummaryWriter

            earlier = set(self._files())
            # With the default max_queue of 10, a call waits for the writer's thread as soon as 10 values are queued.
            self._experiment = SummaryWriter(self.log_dir, purge_step=self._purge_here, max_queue=MAX_QUEUED_CALLS)
            self._file = next((path for path in self._files() if path not in earlier), None)
        return self._experiment

    def _files(self) -> Iterator[Path]:
        """Returns TensorBoard's files of all attempts."""
        return Path(self.log_dir).glob("events.out.tfevents.*")

    @property
    def save_dir(self) -> str:
        """Path of the folder of all runs; as in Lightning, `save_dir/name/version_0` is a path for files of the run."""
        return str(self.run.path.parent.absolute())

    @property
    def name(self) -> str:
        """Name of the run, which is final once an attempt has begun."""
        return self.run.name

    @property
    def root_dir(self) -> str:
        """Path of the run's directory."""
        return str(self.run.path.absolute())

    @property
    def log_dir(self) -> str:
        """Folder of the files of all attempts."""
        return str(self.run.path.absolute() / "tensorboard")

    def purge_from(self, step: int) -> None:
        """Hides values that a lost attempt logged after `step` batches, and removes them from `metrics.jsonl`.

        Values of the n-th batch are logged at n - 1 (lightning 2.6).
        """
        self._purge_step = step
        self._cut = step, self.position()[1] if self.position else -1
        self._try_to_write(self._cut_rows, METRICS_FILE)
        self._leave_file()  # if user code has created one: only the beginning of a file can hide values

    def mark_interval(self, step: int) -> tuple[float, int]:
        """Returns the current position, which later rows of this step state: they may be logged an interval later."""
        assert self.position is not None
        self._interval = step, self.position()
        return self._interval[1]

    @rank_zero_only
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        # Lightning (2.6) adds the epoch to all metrics; `x_axis/epoch` shows it, with the fraction of the epoch.
        numbers, others = {}, {}
        for name, value in metrics.items():
            if name != "epoch":
                try:
                    numbers[name] = float(value)
                except (TypeError, ValueError):  # a dictionary of numbers, or not a number
                    others[name] = value
        if numbers:
            self._rows.append(Row(int(step or 0), time.time(), numbers, *self._position_at(step)))
            self._queued.append(self._rows[-1])
        if others:
            self._try_to_write(lambda: super(DurableTensorBoardLogger, self).log_metrics(others, step))
        if step is None or step != self.awaited_step:
            self.save()

    def _position_at(self, step: int | None) -> tuple[float, int] | tuple[()]:
        if self._interval is not None and self._interval[0] == step:
            return self._interval[1]
        return self.position() if self.position else ()

    @rank_zero_only
    def log_hyperparams(self, params: Any, metrics: Any = None, step: int | None = None) -> None:
        params = vars(params) if isinstance(params, Namespace) else params or {}
        super().log_hyperparams(without_secrets(params), metrics, step)

    @rank_zero_only
    def log_text(self, tag: str, text: str, step: int) -> None:
        """Logs a text; it is lost if it cannot be written now."""
        self.log_with(lambda writer: writer.add_text(tag, text, step))

    @rank_zero_only
    def log_with(self, add: Callable[[Any], object]) -> None:
        """Logs what is no scalar, by methods of torch's `SummaryWriter`; it is lost if it cannot be written now."""
        self._try_to_write(lambda: add(self.experiment))

    def save(self) -> None:
        if time.monotonic() - self._flushed_at >= FLUSH_SECONDS:
            self._write(durably=False)

    def flush(self) -> None:
        """Writes all logged values now; afterwards, the rows of `metrics.jsonl` are on the disk."""
        self._write(durably=True)

    def finalize(self, status: str) -> None:
        self._retry_at = dict.fromkeys(self._retry_at, 0.0)  # values in memory would be lost
        self._write(durably=True)
        self._try_to_write(lambda: super(DurableTensorBoardLogger, self).finalize(status))
        self._leave_file()

    def _write(self, durably: bool) -> None:
        self._flushed_at = time.monotonic()
        self._try_to_write(lambda: self._append_rows(durably), METRICS_FILE)
        self._try_to_write(self._write_events)
        if self._experiment is not None:  # a finished logger begins no new file
            self._try_to_write(super().save)

    def _cut_rows(self) -> None:
        if self._cut is not None:
            cut_rows(self.run.path, *self._cut)
            self._cut = None

    def _append_rows(self, durably: bool) -> None:
        self._cut_rows()
        if self._rows or (durably and self._is_unsynced):
            self.run.claim()
            append_rows(self.run.path, merged(self._rows), durably)
            self._rows.clear()
            self._is_unsynced = not durably

    def _write_events(self) -> None:
        """Writes all waiting values, those of a row as one event: the writer's thread reopens the file for each."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if not self._queued:
            return
        writer = self.experiment.file_writer
        for row in self._queued:
            summary = Summary()
            for name, number in row.values.items():
                summary.value.add(tag=name, simple_value=number, metadata=self._new_metadata(name))
            writer.add_event(Event(summary=summary), row.step, row.seconds)
        writer.flush()
        self._queued.clear()
        if self._purge_here is not None and self._purge_file is None:
            self._purge_file = self._file

    def _new_metadata(self, tag: str) -> Any:
        """Returns the description of a series before its first value; None before further values."""
        if tag not in self.descriptions or tag in self._described:
            return None
        from tensorboard.compat.proto.summary_pb2 import SummaryMetadata

        self._described.add(tag)
        return SummaryMetadata(summary_description=self.descriptions[tag])

    def _try_to_write(self, write: Callable[[], object], file: str = "TensorBoard's file") -> None:
        if self.is_muted or time.monotonic() < self._retry_at.get(file, 0.0):
            return
        try:
            self._leave_deleted_file()
            write()
            self._retry_at.pop(file, None)
        except (OSError, ValueError) as raised:
            # Lightning wraps the error to name the metric.
            error = raised.__cause__ if isinstance(raised, ValueError) else raised
            if not isinstance(error, OSError):
                raise
            if not self._retry_at:
                rank_zero_warn(f"rankzero: the run's curves cannot be written now, and are kept in memory: {error}")
            self._retry_at[file] = time.monotonic() + RETRY_SECONDS
            if file != METRICS_FILE:
                self._leave_file()

    def _leave_deleted_file(self) -> None:
        """Leaves a file that was deleted; the writer would create it again without its beginning, or fail."""
        path = self._file if self._experiment is not None else None
        if path is None:
            return
        try:
            path.stat()
        except FileNotFoundError:
            rank_zero_warn(
                f"rankzero: a TensorBoard file in {self.log_dir} was deleted during the run: TensorBoard no longer "
                "shows earlier values of this attempt, training continues, and new values are written to a new file"
            )
            self._leave_file()
            with suppress(OSError):
                path.unlink()  # closing may have written it again

    def _leave_file(self) -> None:
        """Makes the next write begin a new file, which hides values of earlier attempts unless that is done."""
        writer, self._experiment = self._experiment, None
        if writer is not None:
            with suppress(Exception):
                writer.close()
        self._described.clear()
        has_purged = self._purge_file is not None and self._purge_file.exists()
        # In a further file, it would hide the values of this attempt.
        self._purge_here = None if has_purged else self._purge_step
        if self._purge_here is not None:
            self._purge_file = None


def merged(rows: Iterable[Row]) -> list[Row]:
    """Returns one row for consecutive rows of the same step: values of the model, and Rankzero's measurements."""
    groups = [list(group) for _, group in itertools.groupby(rows, key=attrgetter("step"))]
    return [group[0]._replace(values=dict(ChainMap(*(row.values for row in reversed(group))))) for group in groups]
