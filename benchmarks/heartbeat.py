"""Cost of monitoring a rank: alternate blocks of steps of one run, with and without monitoring.

python benchmarks/heartbeat.py                  # the tutorial's MLP, one process
python benchmarks/heartbeat.py --devices 2      # the same model with two processes (gloo)

Each process has one thread. Without monitoring, a step still calls the recording functions, but they do nothing; no
rank reports its status, and no step is measured for slow ranks. The times are those of rank zero.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer

sys.path.insert(0, str(Path(__file__).parent))

from contest import ROOT, Comparison, parser, run

from rankzero.distributed.monitoring.activity import Activity
from rankzero.distributed.monitoring.heartbeat import Heartbeat
from rankzero.tracking.measurements.slow_ranks import SlowRanks
from rankzero.training.hooks import LoopCallback


class Alternate(LoopCallback):
    """Turns recording and reporting on and off after each block of steps, and writes the seconds of each block.

    Args:
        path: JSON file to write: a list of pairs, with and without monitoring, in seconds per step.
        steps: Steps in a block.
    """

    def __init__(self, path: str, steps: int) -> None:
        self.path, self.steps = Path(path), steps
        self._methods = Activity.enter, Activity.begin_batch, Heartbeat.status, SlowRanks.on_tick
        self._seconds: dict[bool, list[float]] = {True: [], False: []}
        self._started, self._is_on = 0.0, True

    def on_step_done(self, trainer: Trainer) -> None:
        block, position = divmod(trainer.global_step, self.steps)
        if position:
            return
        if block > 1:
            self._seconds[self._is_on].append((time.perf_counter() - self._started) / self.steps)
        self._is_on = block % 4 in (0, 1)  # on, on, off, off: a steady change of speed affects both alike
        methods = self._methods if self._is_on else (lambda *_: None,) * 4
        Activity.enter, Activity.begin_batch, Heartbeat.status, SlowRanks.on_tick = methods  # type: ignore
        self._started = time.perf_counter()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self.path.write_text(json.dumps(list(zip(self._seconds[True], self._seconds[False], strict=False))))


def pairs_of_microseconds(devices: int, steps: int, pairs: int) -> Iterator[tuple[float, float]]:
    """Yields microseconds per step, with and without monitoring, of pairs of blocks of one run."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pairs.json"
        command = [sys.executable, str(ROOT / "launch/fit.py"), "--model", "MLP", "--data", "Toy", "--root", folder]
        command += ["--data.count", "65536", "--batch_size", "32", "--trainer.max_steps", str((4 + 2 * pairs) * steps)]
        command += ["--devices", str(devices), "--accelerator", "cpu", "--trainer.limit_val_batches", "0"]
        command += ["--save_every", "1000", "--trainer.callbacks", "heartbeat.Alternate"]
        command += ["--trainer.callbacks.path", str(path), "--trainer.callbacks.steps", str(steps)]
        run([*command, "--epochs", "100000"], threads=1)
        for with_it, without_it in json.loads(path.read_text())[:pairs]:
            yield 1e6 * with_it, 1e6 * without_it


def main() -> None:
    """Measures with and without monitoring in turn, and prints medians and spreads."""
    flags = parser(__doc__ or "")
    flags.add_argument("--devices", type=int, default=1)
    flags.add_argument("--steps", type=int, default=100, help="steps in a block")
    arguments = flags.parse_args()
    pairs = list(pairs_of_microseconds(arguments.devices, arguments.steps, arguments.pairs))
    columns = {name: iter([pair[index] for pair in pairs]) for index, name in enumerate(("ours", "without monitoring"))}
    title = f"a step of the tutorial's MLP, {arguments.devices} process{'es' * (arguments.devices > 1)}"
    variants = {name: column.__next__ for name, column in columns.items()}
    Comparison(f"heartbeat-{arguments.devices}", title, "microseconds", variants).run(
        arguments.pairs, arguments.json_dir
    )


if __name__ == "__main__":
    main()
