"""Total time that one save adds to training: Rankzero compared with a plain `torch.save` after the same steps.

python benchmarks/checkpoint_stall.py                   # a state of 200 MB; each is measured in 5 separate processes
python benchmarks/checkpoint_stall.py --threads 1       # training leaves a core idle, as it does on a GPU
python benchmarks/checkpoint_stall.py --width 512 --steps 40 --pairs 1

Of the steps between two saves, the first half runs while the save is written, and the second half after the save. The
cost of a save is the difference between the two halves: the copy, and the slowdown caused by the writer. Medians reduce
the influence of other load on the machine: each step of the first half is a median over the saves of a process, and a
step of the second half is a median too. The first save has to allocate memory and is reported separately.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from contest import ROOT, Comparison, format_spread, parser, run, run_for_json
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

LAYERS, BATCH = 6, 32


class Samples(Dataset[Tensor]):
    """Data set of any length that returns the same sample each time, so that reading takes almost no time."""

    def __init__(self, count: int, width: int) -> None:
        self.count, self.sample = count, torch.randn(width)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return self.sample


class Data(LightningDataModule):
    """Data module whose epoch has the given number of steps."""

    def __init__(self, steps: int, width: int) -> None:
        super().__init__()
        self.samples = Samples(steps * BATCH, width)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.samples, batch_size=BATCH)


class Wide(LightningModule):
    """Linear layers trained with momentum: 200 MB of state at a width of 2,048."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.network = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())))

    def training_step(self, batch: Tensor, batch_idx: int = 0) -> Tensor:
        loss: Tensor = self.network(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Stopwatch(Callback):
    """Callback that records when each step begins, and whether a save is being written at that time.

    Args:
        path: JSON file to which the records are written at the end of training.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.times: list[float] = []
        self.writing: list[bool] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.times.append(time.perf_counter())
        self.writing.append(any(thread.name == "rankzero-writer" for thread in threading.enumerate()))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.path.write_text(json.dumps([self.times, self.writing]))


def rankzero_step_times(folder: Path, saves: int, steps: int, width: int, threads: int) -> list[float]:
    """Returns the times, in seconds, at which the steps of a run with `--save_every` begin."""
    command = [sys.executable, str(ROOT / "launch/fit.py"), "--run", "x", "--root", str(folder), "--accelerator", "cpu"]
    command += ["--model", "checkpoint_stall.Wide", f"--model.width={width}", "--epochs", "1"]
    command += ["--data", "checkpoint_stall.Data", f"--data.steps={saves * steps + steps}", f"--data.width={width}"]
    command += ["--save_every", f"{steps}steps", "--keep", "1"]
    command += ["--trainer.callbacks", "checkpoint_stall.Stopwatch", "--trainer.callbacks.path", str(folder / "times")]
    run(command, threads)
    times, writing = json.loads((folder / "times").read_text())
    if late_count := sum(writing[steps - 1 + steps // 2 :: steps]):
        print(f"{late_count} of {saves} saves were still being written half way to the next one: raise --steps")
    return list(times)


def loop_step_times(folder: Path, saves: int, steps: int, width: int) -> list[float]:
    """Returns the times, in seconds, at which the steps of a hand-written loop begin."""
    model = Wide(width)
    optimizer, times = model.configure_optimizers(), []
    for number, batch in enumerate(Data(saves * steps + steps, width).train_dataloader(), 1):
        times.append(time.perf_counter())
        optimizer.zero_grad()
        model.training_step(batch).backward()
        optimizer.step()
        if number % steps == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "last.pt")
    return times


def save_costs(times: list[float], steps: int) -> tuple[float, float]:
    """Returns the costs in milliseconds of the first save and of a later save."""
    half = steps // 2
    durations = [1000 * (end - begin) for begin, end in pairwise(times[steps - 1 :])]  # the first step ends with a save
    saves = [durations[start : start + steps] for start in range(0, len(durations) - steps + 1, steps)]
    undisturbed = half * statistics.median(duration for save in saves for duration in save[half:])
    later = sum(
        statistics.median(step_durations) for step_durations in zip(*(save[:half] for save in saves[1:]), strict=True)
    )
    return sum(saves[0][:half]) - undisturbed, later - undisturbed


def main() -> None:
    """Measures with each number of threads: by default with one thread, and with one per core."""
    argument_parser = parser(__doc__)
    argument_parser.add_argument("--saves", type=int, default=4, help="in a process, beside the first one")
    argument_parser.add_argument("--steps", type=int, default=30, help="between two saves")
    argument_parser.add_argument("--width", type=int, default=2048, help="of the layers")
    argument_parser.add_argument(
        "--threads", type=int, nargs="+", default=sorted({1, os.cpu_count() or 1}), help="that training takes"
    )
    argument_parser.add_argument("--theirs", action="store_true", help="measure this one alone, in this process")
    arguments = argument_parser.parse_args()
    count = arguments.saves + 1
    if arguments.theirs:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(loop_step_times(Path(folder), count, arguments.steps, arguments.width)))
        return

    for threads in arguments.threads:
        compare(arguments, count, threads)


def compare(arguments: argparse.Namespace, count: int, threads: int) -> None:
    """Measures both variants in turn, with `threads` threads."""
    first_costs: dict[str, list[float]] = {"ours": [], "torch.save": []}

    def measure(name: str) -> float:
        with tempfile.TemporaryDirectory() as folder:
            if name == "ours":
                times = rankzero_step_times(Path(folder), count, arguments.steps, arguments.width, threads)
            else:
                command = [sys.executable, __file__, "--theirs", f"--saves={arguments.saves}"]
                times = run_for_json([*command, f"--steps={arguments.steps}", f"--width={arguments.width}"], threads)
        first, cost = save_costs(times, arguments.steps)
        first_costs[name].append(first)
        return cost

    measures: Mapping[str, Any] = {name: lambda name=name: measure(name) for name in first_costs}
    Comparison(
        name=f"checkpoint_stall-{threads}",
        title=f"What a save costs training, on {threads} of {os.cpu_count()} cores",
        unit="ms",
        measure=measures,
        targets={"torch.save": 0.05},
    ).run(arguments.pairs, arguments.json_dir)
    for name, figures in first_costs.items():
        print(f"the first save of a process, {name}: {format_spread(figures)} ms")


if __name__ == "__main__":
    main()
