"""What each shortcut of the source saves, measured alone: ours as it is beside ours without it.

python benchmarks/tricks.py --which optimizer-step       # the optimizer's step without torch's wrapper
python benchmarks/tricks.py --which backward             # the backward pass without Tensor.backward
python benchmarks/tricks.py --which validation-schedule  # a time limit that knows when validations are due

The last one counts the steps that a time limit leaves out. Each figure comes from a process of its own, on one thread.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

sys.path.insert(0, str(Path(__file__).parent))

from clock import Clock
from contest import ROOT, Contest, parser, run

TOY = ["--model", "MLP", "--data", "Toy"]


class ClockWithout(Clock):
    """Measures a step with one of the shortcuts replaced by what it stands for.

    Args:
        path: Where the figure goes, as JSON.
        shortcut: Name of the shortcut; empty for none.
    """

    def __init__(self, path: str, shortcut: str = "") -> None:
        super().__init__(path)
        if shortcut:
            REPLACE[shortcut]()


class CountWithout(Callback):
    """Counts the steps of a run that stops at its time limit, with a shortcut replaced or not.

    Args:
        path: Where the figure goes, as JSON.
        shortcut: Name of the shortcut; empty for none.
    """

    def __init__(self, path: str, shortcut: str = "") -> None:
        self.path = Path(path)
        if shortcut:
            REPLACE[shortcut]()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.path.write_text(json.dumps(trainer.global_step))


def replace_optimizer_step() -> None:
    """Calls the optimizer's step with torch's wrapper around it."""
    from rankzero.training import step

    step.fast_step = lambda optimizer: lambda closure: optimizer.step(closure=closure)  # type: ignore[attr-defined]


def replace_backward() -> None:
    """Calls `Tensor.backward`."""
    from rankzero.training import step

    step.fast_backward = lambda loss: loss.backward()  # type: ignore[attr-defined]


def replace_validation_schedule() -> None:
    """Takes any step for one with a validation."""
    from rankzero.training.callbacks import time_limit
    from rankzero.training.callbacks.wall_time import Kind

    time_limit.next_steps = lambda trainer: [Kind.VALIDATION, Kind.VALIDATION]


REPLACE: dict[str, Callable[[], None]] = {
    "optimizer-step": replace_optimizer_step,
    "backward": replace_backward,
    "validation-schedule": replace_validation_schedule,
}


class SlowToValidate(LightningModule):
    """Trains for 0.05 s a step, and validates for 1 s a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(20, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        time.sleep(0.05)
        return self.layer(batch[0]).mean()

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        time.sleep(1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def measure(callback: str, shortcut: str, what: list[str]) -> float:
    """Trains with a callback of this file or of none, with a shortcut or (named) without it; returns what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figure.json"
        command = [sys.executable, str(ROOT / "launch/fit.py"), *what, "--root", folder, "--accelerator", "cpu"]
        command += ["--trainer.callbacks", f"tricks.{callback}", "--trainer.callbacks.path", str(path)]
        run([*command, "--trainer.callbacks.shortcut", shortcut], threads=1, codes=(0, 75))
        return float(json.loads(path.read_text()))


def step(shortcut: str, what: list[str], count: int, epochs: int) -> float:
    """Microseconds a step."""
    size = ["--data.count", str(count), "--batch_size", "32", "--epochs", str(epochs)]
    return 1e6 * measure("ClockWithout", shortcut, [*what, *size, "--trainer.limit_val_batches", "0"])


def seconds_a_step(shortcut: str, limit: int) -> float:
    """Seconds of the time limit for each step that was taken before it."""
    what = ["--model", "tricks.SlowToValidate", "--data", "Toy", "--data.count", "3200", "--batch_size", "32"]
    what += ["--epochs", "1000", "--time_limit", f"{limit}s", "--trainer.limit_val_batches", "5"]
    return limit / measure("CountWithout", shortcut, what)


WHAT = {
    "optimizer-step": TOY,
    "backward": TOY,
}
"""Shortcut -> what a step is measured on."""


def main() -> None:
    """Measures in turn, and prints medians and spreads."""
    flags = parser(__doc__ or "")
    flags.add_argument("--which", choices=REPLACE, required=True)
    flags.add_argument("--count", type=int, default=65536, help="samples an epoch")
    flags.add_argument("--epochs", type=int, default=5)
    flags.add_argument("--time_limit", type=int, default=60, help="seconds, for validation-schedule")
    arguments = flags.parse_args()
    which = arguments.which

    def cost(shortcut: str) -> float:
        if which in WHAT:
            return step(shortcut, WHAT[which], arguments.count, arguments.epochs)
        return seconds_a_step(shortcut, arguments.time_limit)

    unit = "microseconds a step" if which in WHAT else "seconds of the limit a step"
    contestants = {"ours": lambda: cost(""), "without it": lambda: cost(which)}
    Contest(f"tricks-{which}", which, unit, contestants).run(arguments.pairs, arguments.json_dir)


if __name__ == "__main__":
    main()
