"""Cost of recording and reporting what a rank is doing: a run with and without it.

python benchmarks/heartbeat.py                  # the tutorial's MLP, one process
python benchmarks/heartbeat.py --devices 2      # the same model with two processes (gloo)

Each figure comes from a separate run with one thread per process, and is the mean over all epochs but the first.
Without it, a step still calls the recording function once per phase, but the function does nothing.
"""

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from clock import Clock
from contest import ROOT, Comparison, parser, run


class ClockWithoutHeartbeat(Clock):
    """Clock for a run whose ranks neither record nor report what they are doing."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        from rankzero.distributed.hangs.activity import Activity
        from rankzero.distributed.hangs.watch import HangWatch

        Activity.enter = lambda self, phase: None  # type: ignore[method-assign]
        HangWatch.start = lambda self, *arguments: None  # type: ignore[assignment, method-assign]


def microseconds(callback: str, devices: int, count: int, epochs: int) -> float:
    """Returns microseconds per step of a run with the given clock."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clock.json"
        command = [sys.executable, str(ROOT / "launch/fit.py"), "--model", "MLP", "--data", "Toy", "--root", folder]
        command += ["--data.count", str(count), "--batch_size", "32", "--epochs", str(epochs), "--accelerator", "cpu"]
        command += ["--devices", str(devices), "--trainer.limit_val_batches", "0"]
        run([*command, "--trainer.callbacks", callback, "--trainer.callbacks.path", str(path)], threads=1)
        return 1e6 * float(json.loads(path.read_text()))


def main() -> None:
    """Measures with and without the heartbeat in turn, and prints medians and spreads."""
    flags = parser(__doc__ or "")
    flags.add_argument("--devices", type=int, default=1)
    flags.add_argument("--count", type=int, default=65536, help="samples an epoch")
    flags.add_argument("--epochs", type=int, default=5)
    arguments = flags.parse_args()
    size = (arguments.devices, arguments.count, arguments.epochs)
    variants = {
        "ours": lambda: microseconds("clock.Clock", *size),
        "without it": lambda: microseconds("heartbeat.ClockWithoutHeartbeat", *size),
    }
    name = f"heartbeat-{arguments.devices}"
    Comparison(name, f"a step of the tutorial's MLP, {arguments.devices} processes", "microseconds", variants).run(
        arguments.pairs, arguments.json_dir
    )


if __name__ == "__main__":
    main()
