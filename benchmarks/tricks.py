"""Time that a single shortcut in the source saves: Rankzero compared with Rankzero without the shortcut.

python benchmarks/tricks.py --which optimizer-step       # the optimizer step without torch's wrapper
python benchmarks/tricks.py --which backward             # the backward pass without Tensor.backward
python benchmarks/tricks.py --which validation-schedule  # a time limit that knows when validations are due

The last one measures how many steps fit into a time limit. Each figure comes from a separate process with one thread.
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
from contest import ROOT, Comparison, parser, run

TOY_CLASSES = ["--model", "MLP", "--data", "Toy"]


class ClockWithout(Clock):
    """Clock that can replace one of the shortcuts with the code that the shortcut avoids.

    Args:
        path: JSON file to write.
        shortcut: Name of the shortcut to replace; empty for none.
    """

    def __init__(self, path: str, shortcut: str = "") -> None:
        super().__init__(path)
        if shortcut:
            REPLACEMENTS[shortcut]()


class CountWithout(Callback):
    """Callback that counts the steps of a run until its time limit, and can replace one of the shortcuts.

    Args:
        path: JSON file to write.
        shortcut: Name of the shortcut to replace; empty for none.
    """

    def __init__(self, path: str, shortcut: str = "") -> None:
        self.path = Path(path)
        if shortcut:
            REPLACEMENTS[shortcut]()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.path.write_text(json.dumps(trainer.global_step))


def replace_optimizer_step() -> None:
    """Replaces `stepper` with `optimizer.step`, which includes torch's wrapper."""
    from rankzero.training import loop

    loop.stepper = lambda optimizer: lambda closure: optimizer.step(closure=closure)


def replace_backward() -> None:
    """Replaces `torch_inside.backward` with `Tensor.backward`."""
    from rankzero.training import loop

    loop.backward = lambda loss: loss.backward()


def replace_validation_schedule() -> None:
    """Makes the time limit assume that every step has a validation."""
    from rankzero.training.callbacks import time_limit

    time_limit.next_steps = lambda trainer: [time_limit.StepKind.VALIDATION] * 2


REPLACEMENTS: dict[str, Callable[[], None]] = {
    "optimizer-step": replace_optimizer_step,
    "backward": replace_backward,
    "validation-schedule": replace_validation_schedule,
}


class SlowToValidate(LightningModule):
    """Model that trains for 0.05 s per step and validates for 1 s per batch."""

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


def measure(callback: str, shortcut: str, flags: list[str]) -> float:
    """Trains with a callback of this file, without the named shortcut if any, and returns the callback's figure."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figure.json"
        command = [sys.executable, str(ROOT / "launch/fit.py"), *flags, "--root", folder, "--accelerator", "cpu"]
        command += ["--trainer.callbacks", f"tricks.{callback}", "--trainer.callbacks.path", str(path)]
        run([*command, "--trainer.callbacks.shortcut", shortcut], threads=1, codes=(0, 75))
        return float(json.loads(path.read_text()))


def step(shortcut: str, classes: list[str], count: int, epochs: int) -> float:
    """Returns microseconds per step."""
    size = ["--data.count", str(count), "--batch_size", "32", "--epochs", str(epochs)]
    return 1e6 * measure("ClockWithout", shortcut, [*classes, *size, "--trainer.limit_val_batches", "0"])


def seconds_per_step(shortcut: str, limit: int) -> float:
    """Returns the time limit in seconds, divided by the number of steps that fit into it."""
    flags = ["--model", "tricks.SlowToValidate", "--data", "Toy", "--data.count", "3200", "--batch_size", "32"]
    flags += ["--epochs", "1000", "--time_limit", f"{limit}s", "--trainer.limit_val_batches", "5"]
    return limit / measure("CountWithout", shortcut, flags)


STEP_CLASSES = {"optimizer-step": TOY_CLASSES, "backward": TOY_CLASSES}
"""Shortcut -> flags for the model and data on which a step is measured."""


def main() -> None:
    """Measures with and without the shortcut in turn, and prints medians and spreads."""
    flags = parser(__doc__ or "")
    flags.add_argument("--which", choices=REPLACEMENTS, required=True)
    flags.add_argument("--count", type=int, default=65536, help="samples an epoch")
    flags.add_argument("--epochs", type=int, default=5)
    flags.add_argument("--time_limit", type=int, default=60, help="seconds, for validation-schedule")
    arguments = flags.parse_args()
    measured_shortcut = arguments.which

    def cost(shortcut: str) -> float:
        if measured_shortcut in STEP_CLASSES:
            return step(shortcut, STEP_CLASSES[measured_shortcut], arguments.count, arguments.epochs)
        return seconds_per_step(shortcut, arguments.time_limit)

    unit = "microseconds a step" if measured_shortcut in STEP_CLASSES else "seconds of the limit a step"
    variants = {"ours": lambda: cost(""), "without it": lambda: cost(measured_shortcut)}
    Comparison(f"tricks-{measured_shortcut}", measured_shortcut, unit, variants).run(
        arguments.pairs, arguments.json_dir
    )


if __name__ == "__main__":
    main()
