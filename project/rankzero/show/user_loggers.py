"""Continues the user's loggers over the attempts of a run: the same version or id, without rows of a lost attempt."""

import contextlib
import csv
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from rankzero.checkpoints.atomic_files import replacing, write_text
from rankzero.messages import print_notice
from rankzero.runs.directory import RunDirectory
from rankzero.training.lightning_inside import continue_version, forget_run

WANDB_ID = "WANDB_RUN_ID"
"""Variable with the id of the next run of Weights & Biases."""


class UserLoggers:
    """The loggers that the user has passed to a Trainer.

    Args:
        run: Directory of the run, whose `run.json` records version and folder of each logger.
        own: The run's own logger, which is not among them.
    """

    def __init__(self, run: RunDirectory, own: Logger | None) -> None:
        self.run, self.own = run, own
        self._begun: list[Logger] = []  # those that have logged a part of the run in this process

    def continue_versions(self, trainer: Trainer, resumes: bool) -> None:
        """Gives each logger without a version or id that of the run's earlier attempts, before it creates any file."""
        recorded = self.run.read("run.json").get("loggers") or {}
        for name, logger in self._named(trainer):
            earlier = recorded.get(name) or {}
            if isinstance(logger, CSVLogger | TensorBoardLogger):
                if earlier.get("root") == _root(logger) and "://" not in _root(logger):
                    continue_version(logger, earlier["version"])
            elif earlier and trainer.is_global_zero:
                _continue_on_server(logger, earlier["version"])
        if resumes:
            _keep_rows(trainer)

    def begin(self, trainer: Trainer, step: int) -> None:
        """Removes what a lost attempt has logged at `step` or later, and records the versions. Only on rank zero."""
        versions = {}
        finished = self.run.read("summary.json")
        is_end = finished.get("attempts") == self.run.attempt - 1 and finished.get("status") == "finished"
        for name, logger in self._named(trainer):
            if (self.run.attempt > 1 or trainer.ckpt_path) and logger not in self._begun:
                _remove_lost_rows(logger, step + (is_end and finished.get("steps") == step))
            self._begun.append(logger)
            versions[name] = {"version": logger.version, "root": _root(logger)}
        record = self.run.read("run.json")
        if record and record.get("loggers", {}) != versions:
            self.run.record = record | {"loggers": versions}
            with contextlib.suppress(OSError):  # the next write reports it
                write_text(self.run.path / "run.json", json.dumps(self.run.record, indent=2) + "\n")

    def _named(self, trainer: Trainer) -> Iterator[tuple[str, Logger]]:
        for number, logger in enumerate(trainer.loggers):
            if (
                isinstance(logger, CSVLogger | TensorBoardLogger | MLFlowLogger | WandbLogger)
                and logger is not self.own
            ):
                yield f"{number} {type(logger).__name__}", logger


def _root(logger: Logger) -> str:
    """Returns the folder with the versions of a logger; an empty string if it has none."""
    folder = str(getattr(logger, "root_dir", None) or "")
    return folder if "://" in folder else folder and str(Path(folder).absolute())


def _continue_on_server(logger: Any, version: str) -> None:
    """Makes a logger of MLflow or Weights & Biases continue a run, if the server still has it."""
    if isinstance(logger, WandbLogger):
        if logger.version is None and WANDB_ID not in os.environ:
            os.environ[WANDB_ID] = version
            try:
                _ = logger.experiment
            finally:
                del os.environ[WANDB_ID]
        return
    continue_version(logger, version)
    try:
        _ = logger.experiment
    except Exception as error:
        print_notice(f"{type(logger).__name__} begins a new run, because run {version} cannot be continued: {error}")
        forget_run(logger)


def _keep_rows(trainer: Trainer) -> None:
    """Creates the files of all CSV loggers before Lightning does, which deletes existing files (lightning 2.6)."""
    for logger in trainer.loggers if trainer.is_global_zero else ():
        if not isinstance(logger, CSVLogger) or not (path := Path(logger.log_dir, "metrics.csv")).is_file():
            continue
        kept = path.with_name(f"{path.name}.kept")
        path.rename(kept)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the file will be deleted
            experiment = logger.experiment
        kept.rename(path)
        if not experiment.metrics_keys:
            with path.open(newline="") as file:
                experiment.metrics_keys = next(csv.reader(file), [])


def _remove_lost_rows(logger: Logger, step: int) -> None:
    """Removes the rows at `step` or later from the file of a CSV logger, and hides them in those of TensorBoard."""
    if isinstance(logger, CSVLogger) and (path := Path(logger.log_dir, "metrics.csv")).is_file():
        with path.open(newline="") as file:
            header, *rows = csv.reader(file)
        column = header.index("step")
        with replacing(path, ".kept") as temporary, temporary.open("w", newline="") as file:
            csv.writer(file).writerows([header, *(row for row in rows if float(row[column]) < step)])
    elif isinstance(logger, TensorBoardLogger):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        start = Event(session_log=SessionLog(status=SessionLog.START))
        logger.experiment.file_writer.add_event(start, step)  # like `purge_step` of torch's writer
