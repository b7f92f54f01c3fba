"""How much longer training takes for one save, in all: ours beside a plain `torch.save` at the same places.

python benchmarks/checkpoint_stall.py                   # a state of 200 MB, each measured 5 times in its own process
python benchmarks/checkpoint_stall.py --threads 1       # where training leaves a core to spare, as it does on a GPU
python benchmarks/checkpoint_stall.py --width 512 --steps 40 --pairs 1

Of the steps between two saves the first half is taken while the save is written, the second half when all is quiet.
What the first half takes longer than the second one is what the save costs: the copy, and all that the writing gets in
the way of. So that what else the machine does counts little, each step of the first half is the median over the saves
of a process, and so is a quiet one. The first save, which meets new memory, is left out there and told apart.
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
from contest import ROOT, Contest, figure, parser, run, spread
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

LAYERS, BATCH = 6, 32


class Samples(Dataset[Tensor]):
    """Any count of them, and next to no work to read one."""

    def __init__(self, count: int, width: int) -> None:
        self.count, self.sample = count, torch.randn(width)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return self.sample


class Data(LightningDataModule):
    """One epoch of so many steps."""

    def __init__(self, steps: int, width: int) -> None:
        super().__init__()
        self.samples = Samples(steps * BATCH, width)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.samples, batch_size=BATCH)


class Wide(LightningModule):
    """Linear layers, learned with momentum: 200 MB of state at a width of 2,048."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.network = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())))

    def training_step(self, batch: Tensor, batch_idx: int = 0) -> Tensor:
        loss: Tensor = self.network(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Stopwatch(Callback):
    """Notes when each step begins, and whether a save is being written then; writes it all down at the end.

    Args:
        path: Where to.
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


def ours(folder: Path, saves: int, steps: int, width: int, threads: int) -> list[float]:
    """When the steps of a run begin, whose command line asks for the saves."""
    command = [sys.executable, str(ROOT / "launch/fit.py"), "--run", "x", "--root", str(folder), "--accelerator", "cpu"]
    command += ["--model", "checkpoint_stall.Wide", f"--model.width={width}", "--epochs", "1"]
    command += ["--data", "checkpoint_stall.Data", f"--data.steps={saves * steps + steps}", f"--data.width={width}"]
    command += ["--save_every", f"{steps}steps", "--keep", "1"]
    command += ["--trainer.callbacks", "checkpoint_stall.Stopwatch", "--trainer.callbacks.path", str(folder / "times")]
    run(command, threads)
    times, writing = json.loads((folder / "times").read_text())
    if late := sum(writing[steps - 1 + steps // 2 :: steps]):
        print(f"{late} of {saves} saves were still being written half way to the next one: raise --steps")
    return list(times)


def theirs(folder: Path, saves: int, steps: int, width: int) -> list[float]:
    """When the steps of a loop begin that is written by hand."""
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


def costs(times: list[float], steps: int) -> tuple[float, float]:
    """Milliseconds that the first save has cost, and one of the others."""
    half = steps // 2
    taken = [1000 * (end - begun) for begun, end in pairwise(times[steps - 1 :])]  # the first one ends with a save
    saves = [taken[start : start + steps] for start in range(0, len(taken) - steps + 1, steps)]
    quiet = half * statistics.median(one for save in saves for one in save[half:])
    others = sum(statistics.median(ones) for ones in zip(*(save[:half] for save in saves[1:]), strict=True))
    return sum(saves[0][:half]) - quiet, others - quiet


def main() -> None:
    """Measures with a core to spare, and with all of them busy."""
    flags = parser(__doc__)
    flags.add_argument("--saves", type=int, default=4, help="in a process, beside the first one")
    flags.add_argument("--steps", type=int, default=30, help="between two saves")
    flags.add_argument("--width", type=int, default=2048, help="of the layers")
    flags.add_argument(
        "--threads", type=int, nargs="+", default=sorted({1, os.cpu_count() or 1}), help="that training takes"
    )
    flags.add_argument("--theirs", action="store_true", help="measure this one alone, in this process")
    asked = flags.parse_args()
    count = asked.saves + 1
    if asked.theirs:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(theirs(Path(folder), count, asked.steps, asked.width)))
        return

    for threads in asked.threads:
        contest(asked, count, threads)


def contest(asked: argparse.Namespace, count: int, threads: int) -> None:
    """Measures both in turn, on so many threads."""
    firsts: dict[str, list[float]] = {"ours": [], "torch.save": []}

    def measure(name: str) -> float:
        with tempfile.TemporaryDirectory() as folder:
            if name == "ours":
                times = ours(Path(folder), count, asked.steps, asked.width, threads)
            else:
                again = [sys.executable, __file__, "--theirs", f"--saves={asked.saves}"]
                times = figure([*again, f"--steps={asked.steps}", f"--width={asked.width}"], threads)
        first, cost = costs(times, asked.steps)
        firsts[name].append(first)
        return cost

    measures: Mapping[str, Any] = {name: lambda name=name: measure(name) for name in firsts}
    Contest(
        name=f"checkpoint_stall-{threads}",
        title=f"What a save costs training, on {threads} of {os.cpu_count()} cores",
        unit="ms",
        measure=measures,
        targets={"torch.save": 0.05},
    ).run(asked.pairs, asked.json_dir)
    for name, figures in firsts.items():
        print(f"the first save of a process, {name}: {spread(figures)} ms")


if __name__ == "__main__":
    main()
