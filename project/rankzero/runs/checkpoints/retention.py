"""Which checkpoints are kept. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankzero.runs.checkpoints.manifest import checkpoints_in, read_manifest


@dataclass(frozen=True)
class Retention:
    """The newest few, and the best by a metric.

    Args:
        keep: How many of the newest.
        best: `min:NAME` or `max:NAME`, the metric that says which is best; None where none is kept for that.
    """

    keep: int = 3
    best: str | None = None

    def surplus(self, folder: Path) -> list[Path]:
        """The checkpoints that are not kept, oldest first."""
        older = checkpoints_in(folder)[: -self.keep]
        best = self.best_in(folder) if older else None
        return [path for path in older if path != best]

    @property
    def metric(self) -> str | None:
        """The name of the metric that says which is best."""
        return self.best.partition(":")[2] if self.best else None

    def best_in(self, folder: Path) -> Path | None:
        """The best checkpoint; of equals the oldest, which is the one that the metric was computed for."""
        if self.best is None or self.metric is None:
            return None
        mode = self.best.partition(":")[0]
        values = {path: _metrics(path).get(self.metric) for path in checkpoints_in(folder)}
        known = {path: value for path, value in values.items() if isinstance(value, int | float)}
        if not known:
            return None
        return (min if mode == "min" else max)(known, key=lambda path: known[path])


def _metrics(checkpoint: Path) -> Mapping[str, Any]:
    try:
        metrics = read_manifest(checkpoint)["rankzero"].get("metrics")
    except ValueError:
        return {}
    return metrics if isinstance(metrics, dict) else {}
