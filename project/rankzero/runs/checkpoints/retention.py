"""Retention of checkpoints: which ones are kept. Does not import torch."""

from dataclasses import dataclass
from pathlib import Path

from rankzero.runs.checkpoints.manifest import checkpoints_in, part_of, read_manifest


@dataclass(frozen=True)
class Retention:
    """Rule that keeps the newest checkpoints, the last one of each part of the run, and the best one by a metric.

    When the run's script starts again, it restores the last checkpoint of a part that has ended.

    Args:
        keep: Number of newest checkpoints to keep.
        best: `min:NAME` or `max:NAME` with the metric that selects the best checkpoint; None for no best checkpoint.
    """

    keep: int = 3
    best: str | None = None

    def surplus(self, folder: Path) -> list[Path]:
        """Returns the checkpoints to delete, oldest first."""
        checkpoints = checkpoints_in(folder)
        older = checkpoints[: -self.keep]
        kept = {part_of(path): path for path in checkpoints}.values()
        best = self.best_in(folder) if older else None
        return [path for path in older if path != best and path not in kept]

    @property
    def metric(self) -> str | None:
        """Name of the metric that selects the best checkpoint; None without one."""
        return self.best.partition(":")[2] if self.best else None

    def best_in(self, folder: Path) -> Path | None:
        """Returns the best checkpoint; among equals the oldest: later ones can repeat a metric computed for it."""
        if self.best is None or self.metric is None:
            return None
        mode = self.best.partition(":")[0]
        values = {path: self.score_of(path) for path in checkpoints_in(folder)}
        known = {path: value for path, value in values.items() if value is not None}
        if not known:
            return None
        return (min if mode == "min" else max)(known, key=lambda path: known[path])

    def score_of(self, checkpoint: Path) -> float | None:
        """Returns the value of the metric in a checkpoint; None if it has none."""
        try:
            metrics = read_manifest(checkpoint)["rankzero"].get("metrics")
        except ValueError:
            return None
        value = metrics.get(self.metric) if isinstance(metrics, dict) else None
        return value if isinstance(value, int | float) else None
