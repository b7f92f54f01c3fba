"""Cost of a feature of Rankzero per step: alternate blocks of steps of one run, with and without the feature.

python benchmarks/features.py --feature tracking                 # curves; the tutorial's MLP, one process
python benchmarks/features.py --feature monitoring --devices 2   # phases and slow ranks; two processes (gloo)
python benchmarks/features.py --feature tracking --model resnet  # ResNet-18, 32x32 pixels, 32 images per process

The cores are divided among the processes. Without a feature, a step still calls its functions, but they return at once.
The times are those of rank zero.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer

sys.path.insert(0, str(Path(__file__).parent))

from contest import ROOT, Comparison, parser, run

from rankzero.distributed.monitoring.activity import Activity
from rankzero.distributed.monitoring.monitor import Heartbeat
from rankzero.show.measurements.interval_measurements import IntervalMeasurements
from rankzero.show.measurements.step_time import SlowRanks
from rankzero.training.hooks import LoopCallback
from rankzero.training.metrics.step_log import IntervalRecord

FEATURES = {
    "monitoring": ((Activity, "enter"), (Activity, "begin_batch"), (Heartbeat, "status"), (SlowRanks, "on_tick")),
    "tracking": (
        *((IntervalMeasurements, "on_logging_step"), (IntervalMeasurements, "on_interval_end")),
        *((IntervalRecord, "add_loss"), (IntervalRecord, "measure_gradients")),
    ),
}
"""Feature -> the methods that do its work in a step."""

MODELS = {
    "mlp": ["--model", "MLP", "--data", "Toy", "--data.count", "65536", "--batch_size", "32"],
    "resnet": [
        *("--model", "ResNet", "--model.depth", "18", "--data", "SyntheticImages", "--data.image_size=32"),
        *("--data.count", "4096", "--batch_size", "32", "--fast", "yes"),
    ],
}
STEPS = {"mlp": 100, "resnet": 10}
"""Model -> steps in a block."""


class Alternate(LoopCallback):
    """Turns a feature on and off after each block of steps, and writes the seconds of each block.

    Args:
        path: JSON file to write: a list of pairs, with and without the feature, in seconds per step.
        feature: Name of the feature.
        steps: Steps in a block.
    """

    def __init__(self, path: str, feature: str, steps: int) -> None:
        self.path, self.steps = Path(path), steps
        self._seconds: dict[bool, list[float]] = {True: [], False: []}
        self._started, self._is_on = 0.0, True
        for owner, name in FEATURES[feature]:
            setattr(owner, name, self._switched(getattr(owner, name)))

    def _switched(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*arguments: Any) -> Any:
            return method(*arguments) if self._is_on else None

        return call

    def on_step_done(self, trainer: Trainer) -> None:
        block, position = divmod(trainer.global_step, self.steps)
        if position:
            return
        if block > 1:
            self._seconds[self._is_on].append((time.perf_counter() - self._started) / self.steps)
        self._is_on = block % 4 in (0, 1)  # on, on, off, off: a steady change of speed affects both alike
        self._started = time.perf_counter()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self.path.write_text(json.dumps(list(zip(self._seconds[True], self._seconds[False], strict=False))))


def pairs_of_microseconds(
    feature: str, model: str, devices: int, steps: int, pairs: int
) -> Iterator[tuple[float, float]]:
    """Yields microseconds per step, with and without the feature, of pairs of blocks of one run."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pairs.json"
        command = [sys.executable, str(ROOT / "launch/fit.py"), *MODELS[model], "--root", folder]
        command += ["--trainer.max_steps", str((4 + 2 * pairs) * steps), "--save_every", "1000"]
        command += ["--devices", str(devices), "--accelerator", "cpu", "--trainer.limit_val_batches", "0"]
        command += ["--trainer.callbacks", "features.Alternate", "--trainer.callbacks.path", str(path)]
        command += ["--trainer.callbacks.feature", feature, "--trainer.callbacks.steps", str(steps)]
        run([*command, "--epochs", "100000"], threads=max(1, (os.cpu_count() or 1) // devices) if model != "mlp" else 1)
        for with_it, without_it in json.loads(path.read_text())[:pairs]:
            yield 1e6 * with_it, 1e6 * without_it


def main() -> None:
    """Measures with and without the feature in turn, and prints medians and spreads."""
    flags = parser(__doc__ or "")
    flags.add_argument("--feature", choices=tuple(FEATURES), required=True)
    flags.add_argument("--model", choices=tuple(MODELS), default="mlp")
    flags.add_argument("--devices", type=int, default=1)
    flags.add_argument("--steps", type=int, help="steps in a block")
    arguments = flags.parse_args()
    feature, model, devices = arguments.feature, arguments.model, arguments.devices
    steps = arguments.steps or STEPS[model]
    pairs = list(pairs_of_microseconds(feature, model, devices, steps, arguments.pairs))
    columns = {name: iter([pair[index] for pair in pairs]) for index, name in enumerate(("ours", f"without {feature}"))}
    title = f"a step of the {model}, {devices} process{'es' * (devices > 1)}"
    variants = {name: column.__next__ for name, column in columns.items()}
    Comparison(f"{feature}-{model}-{devices}", title, "microseconds", variants).run(arguments.pairs, arguments.json_dir)


if __name__ == "__main__":
    main()
