"""Everything that a comparison needs of one run. Does not import torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rankzero.runs.reports.recorded.live_values import with_live_values
from rankzero.runs.reports.recorded.recorded_run import CONFIG_FILE, RecordedRun, read_run, stored_config_text
from rankzero.runs.reports.recorded.run_status import Status, status_of
from rankzero.runs.stored_config import Config, read_config
from rankzero.runs.tensorboard.curve import Curve
from rankzero.runs.tensorboard.curves import read_curves


@dataclass(frozen=True)
class ComparedRun:
    """One of the runs that are compared.

    Args:
        label: Its name, or its path if another run has the same name.
        run: What its files record.
        status: Its status.
        config: Configuration of its newest attempt; {} if it cannot be read.
        curves: Its curves, by tag.
    """

    label: str
    run: RecordedRun
    status: Status
    config: Config
    curves: Mapping[str, Curve]

    @property
    def notes(self) -> Iterator[str]:
        """Notes on the run for the user, in addition to the tables."""
        if self.status.note:
            yield f"{self.label}: {self.status.note}"
        if not self.config:
            yield f"{self.label}: {CONFIG_FILE} is missing or damaged, so its settings are not known"
        if not self.curves:
            yield f"{self.label}: there are no curves in {self.run.path / 'tensorboard'}"


def read_compared_runs(paths: Sequence[Path]) -> list[ComparedRun]:
    """Reads runs; values that an unfinished run has logged take the place of those in its summary."""
    compared = [_read(path) for path in paths]
    labels = [entry.label for entry in compared]
    return [replace(entry, label=str(entry.run.path)) if labels.count(entry.label) > 1 else entry for entry in compared]


def _read(path: Path) -> ComparedRun:
    run = read_run(path)
    config = read_config(stored_config_text(path))
    try:
        curves = read_curves(path / "tensorboard")
    except OSError:
        curves = {}
    return ComparedRun(run.name, with_live_values(run), status_of(run), config, curves)
