"""Continues the user's loggers over the attempts of a run: the same version, or the same run on a server."""

import contextlib
import csv
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from rankzero.checkpoints.atomic_files import replacing, write_text
from rankzero.messages import print_notice
from rankzero.runs.directory import RunDirectory
from rankzero.training.lightning_inside import continue_version, destination, mlflow_run


class UserLoggers:
    """The loggers of a Trainer except the run's own; `run.json` records the version of each."""

    def __init__(self, run: RunDirectory, own: Logger | None) -> None:
        self.run, self.own = run, own
        self._begun: list[Logger] = []  # those that have logged a part of the run in this process

    def continue_versions(self, trainer: Trainer, resumes: bool) -> None:
        """Gives each logger without a version that of the run's earlier attempts, before it creates any file."""
        recorded = self.run.read("run.json").get("loggers") or {}
        for name, logger in self._named(trainer):
            if isinstance(logger, MLFlowLogger):
                may_continue = trainer.is_global_zero and name in recorded and _has_run(logger, recorded[name])
            else:  # Lightning would delete the rows at a URL
                may_continue = name in recorded and not (isinstance(logger, CSVLogger) and "://" in logger.root_dir)
            if may_continue:
                continue_version(logger, recorded[name])
            if isinstance(logger, CSVLogger) and trainer.is_global_zero and (resumes or self.run.attempt > 1):
                _keep_rows(logger)

    def begin(self, trainer: Trainer, step: int) -> None:
        """Removes what a lost attempt has logged at `step` or later, and records the versions. Only on rank zero.

        Values at the last step of a finished run stay, because `trainer.test()` has logged them after the fit.
        """
        earlier = self.run.read("summary.json")
        is_end = earlier.get("attempts") == self.run.attempt - 1 and earlier.get("status") == "finished"
        for _, logger in self._named(trainer):
            if (self.run.attempt > 1 or trainer.ckpt_path) and logger not in self._begun:
                _remove_lost_rows(logger, step + (is_end and earlier.get("steps") == step))
            self._begun.append(logger)
        record, named = self.run.read("run.json"), self._named(trainer)
        versions = {name: logger.version for name, logger in named if isinstance(logger.version, int | str)}
        if record and record.get("loggers", {}) != versions:
            self.run.record = record | {"loggers": versions}
            with contextlib.suppress(OSError):  # the next write reports it
                write_text(self.run.path / "run.json", json.dumps(self.run.record, indent=2) + "\n")

    def _named(self, trainer: Trainer) -> Iterator[tuple[str, Logger]]:
        """Yields the loggers that can be continued, by a name that does not depend on other loggers."""
        names: list[str] = []
        for logger in trainer.loggers:
            if isinstance(logger, CSVLogger | TensorBoardLogger | MLFlowLogger | WandbLogger):
                names.append(f"{type(logger).__name__} {destination(logger)}")
                if logger is not self.own:
                    yield f"{names[-1]} {names.count(names[-1])}", logger


def _has_run(logger: MLFlowLogger, version: str) -> bool:
    """Returns whether MLflow still has a run, whose hyperparameters then stay as they are: MLflow permits no change."""
    try:
        if (run := mlflow_run(logger, version)) is None:
            return False
        if run.info.lifecycle_stage != "active":
            raise ValueError(f"it is {run.info.lifecycle_stage}")
    except Exception as error:
        print_notice(f"{type(logger).__name__} begins a new run, because run {version} cannot be continued: {error}")
        return False
    log = logger.log_hyperparams

    def log_hyperparams(*arguments: Any) -> None:
        try:
            log(*arguments)
        except Exception as error:
            print_notice(f"run {version} of MLflow keeps its hyperparameters: {str(error).partition(chr(10))[0]}")

    vars(logger)["log_hyperparams"] = log_hyperparams
    return True


def _keep_rows(logger: CSVLogger) -> None:
    """Creates the file of a logger before Lightning does, which deletes an existing file (lightning 2.6)."""
    path = Path(logger.log_dir, "metrics.csv")
    kept = path.with_name(f"{path.name}.kept")
    if kept.exists() and not path.exists():  # a process was killed below
        kept.rename(path)
    if not path.is_file():
        return
    path.rename(kept)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning warns that it deletes the file
        experiment = logger.experiment
    kept.rename(path)
    experiment.metrics_keys = experiment.metrics_keys or next(csv.reader(path.read_text().splitlines()), [])


def _remove_lost_rows(logger: Logger, step: int) -> None:
    """Removes the rows at `step` or later from the file of a CSV logger, and hides them in those of TensorBoard."""
    if isinstance(logger, CSVLogger) and (path := Path(logger.log_dir, "metrics.csv")).is_file():
        header, *rows = [*csv.reader(path.read_text().splitlines())] or [["step"]]
        column = header.index("step")
        whole = [row for row in rows if len(row) == len(header)]  # a full disk may have cut the last one
        with replacing(path, ".kept") as temporary, temporary.open("w", newline="") as file:
            csv.writer(file).writerows([header, *(row for row in whole if float(row[column]) < step)])
    elif isinstance(logger, TensorBoardLogger):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        start = Event(session_log=SessionLog(status=SessionLog.START))
        logger.experiment.file_writer.add_event(start, step)  # like `purge_step` of torch's writer
