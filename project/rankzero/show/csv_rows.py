"""Keeps the rows of earlier attempts in the file of a CSVLogger with a fixed folder."""

import csv
import warnings
from collections.abc import Iterator
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger

from rankzero.checkpoints.atomic_files import replacing


def keep_rows(trainer: Trainer) -> None:
    """Creates the files of all CSV loggers before Lightning does, which deletes existing files (lightning 2.6)."""
    for logger, path in _files_of(trainer):
        kept = path.with_name(f"{path.name}.kept")
        path.rename(kept)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the file will be deleted
            experiment = logger.experiment
        kept.rename(path)
        if not experiment.metrics_keys:
            with path.open(newline="") as file:
                experiment.metrics_keys = next(csv.reader(file), [])


def remove_lost_rows(trainer: Trainer, step: int) -> None:
    """Removes the rows that a lost attempt has logged at `step` or later, which the resumed run logs again."""
    for _, path in _files_of(trainer):
        with path.open(newline="") as file:
            header, *rows = csv.reader(file)
        column = header.index("step")
        with replacing(path, ".kept") as temporary, temporary.open("w", newline="") as file:
            csv.writer(file).writerows([header, *(row for row in rows if float(row[column]) < step)])


def _files_of(trainer: Trainer) -> Iterator[tuple[CSVLogger, Path]]:
    """Yields the CSV loggers whose file exists, with the file; nothing except on rank zero."""
    for logger in trainer.loggers if trainer.is_global_zero else ():
        if isinstance(logger, CSVLogger) and (path := Path(logger.log_dir, "metrics.csv")).is_file():
            yield logger, path
