"""TensorBoard's curves, on whatever becomes of the disk."""

import time
from collections import deque
from collections.abc import Callable
from io import BytesIO
from typing import Any

from lightning.fabric.utilities.logger import _add_prefix
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn

from rankzero.runs.directory import RunDirectory

AGAIN_SECONDS = 30.0
MOST_WAITING = 100_000
SHOWN_SECONDS = 2.0
"""Values wait so long for one another: to hand one to the writer's thread costs more than a step of a small model."""


def loggers(asked: Any, run: RunDirectory) -> list[Logger] | bool:
    """The loggers of a Trainer.

    Args:
        asked: The Trainer's `logger`: loggers, None or True for the run's own curves, or False.
        run: The run.
    """
    if asked in (None, True):
        return [DurableTensorBoardLogger(run)]
    return (list(asked) if isinstance(asked, list | tuple) else [asked]) if asked else False


class DurableTensorBoardLogger(TensorBoardLogger):
    """Lightning's logger, but a disk that takes nothing more costs the run nothing (tensorboard 2.21).

    Its writer's thread ends with the first error, which then comes back from each call. Here a new writer is tried now
    and then, and what has been logged meanwhile waits until there is room again.

    Args:
        run: The run, whose directory it writes to.
    """

    def __init__(self, run: RunDirectory) -> None:
        # Of ten, which is the default, each waits until the thread has written the one before.
        super().__init__(run.path, name="", version="tensorboard", default_hp_metric=False, max_queue=MOST_WAITING)
        self.run = run
        self._again_at = self._saved_at = 0.0
        self._waiting: deque[tuple[dict[str, float], int | None, float]] = deque(maxlen=MOST_WAITING)

    @property
    def root_dir(self) -> str:
        """The run's directory, which is settled when an attempt begins."""
        return str(self.run.path)

    def purge_from(self, step: int) -> None:
        """Hides what a lost attempt logged after the checkpoint at `step`, so that there is one curve.

        What belongs to the n-th step is logged at n - 1 (lightning 2.6).
        """
        self._kwargs["purge_step"] = step

    @rank_zero_only
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        try:
            self._waiting.append(({name: float(value) for name, value in metrics.items()}, step, time.time()))
        except (TypeError, ValueError):  # a dictionary of numbers; or what has no curve
            self._sturdily(lambda: super(DurableTensorBoardLogger, self).log_metrics(metrics, step))
        self.save()

    def save(self) -> None:
        if time.monotonic() - self._saved_at >= SHOWN_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Has all that was logged written, at once."""
        self._saved_at = time.monotonic()
        self._sturdily(self._write)
        self._sturdily(super().save)

    def finalize(self, status: str) -> None:
        self._sturdily(self._write)
        self._sturdily(lambda: super(DurableTensorBoardLogger, self).finalize(status))

    def _write(self) -> None:
        """Writes what waits, all at once; the writer's thread would open the file anew for each value."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        if not self._waiting:
            return
        written = BytesIO()
        records = RecordWriter(written)
        for numbers, step, seconds in self._waiting:
            named = _add_prefix(numbers, self._prefix, self.LOGGER_JOIN_CHAR)
            values = [Summary.Value(tag=name, simple_value=number) for name, number in named.items()]
            event = Event(wall_time=seconds, step=None if step is None else int(step), summary=Summary(value=values))
            records.write(event.SerializeToString())
        writer = self.experiment._get_file_writer().event_writer
        writer.flush()  # what it holds came before
        writer._general_file_writer.write(written.getvalue())
        self._waiting.clear()

    def _sturdily(self, write: Callable[[], None]) -> None:
        if time.monotonic() < self._again_at:
            return
        try:
            write()
        except (OSError, ValueError) as raised:
            error = (
                raised.__cause__ if isinstance(raised, ValueError) else raised
            )  # Lightning's, which names the metric
            if not isinstance(error, OSError):
                raise
            rank_zero_warn(f"rankzero: TensorBoard's curves cannot be written, and wait: {error}")
            self._again_at = time.monotonic() + AGAIN_SECONDS
            self._experiment = None
            self._kwargs.pop("purge_step", None)  # which would hide what is there
