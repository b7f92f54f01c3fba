"""How long the first batch takes, and how much memory: our order of samples beside DistributedSampler's.

python benchmarks/sampling.py                # 10^9 and 10^8 samples, each measured 5 times in a process of its own
python benchmarks/sampling.py --repeats 1 --count 1000000

The two are measured in turn, so that what else the machine does falls on both.
"""

import argparse
import gc
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, Dataset, DistributedSampler

sys.path.insert(0, str(Path(__file__).parent.parent))

from project.sampling.sharding import Sharding
from project.sampling.training_batches import Position

BATCH, WORLD = 256, 8


class Virtual(Dataset[int]):
    """A data set of any size that holds nothing: sample i is i."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


def ours(count: int, start: int) -> Iterable[torch.Tensor]:
    """A user's loader as the run reads it, on rank 3 of 8, from a sample on."""
    sharding = Sharding(rank=3, world_size=WORLD, seed=0)
    sharding.start = [Position(0, start // (BATCH * WORLD), start)]
    loader: Iterable[torch.Tensor] = sharding.apply(  # type: ignore[assignment]
        DataLoader(Virtual(count), batch_size=BATCH, shuffle=True), training=True
    )
    return loader


def theirs(count: int, start: int) -> Iterable[torch.Tensor]:
    """What a DDP tutorial writes. It has no way to begin but at the beginning."""
    assert start == 0
    data = Virtual(count)
    return DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, num_replicas=WORLD, rank=3))


def measure(whose: str, count: int, start: int, found: "multiprocessing.Queue[tuple[float, float]]") -> None:
    """Seconds to the first batch, and megabytes more than the same with next to no samples."""
    make = {"ours": ours, "DistributedSampler": theirs}[whose]
    next(iter(make(BATCH * WORLD, 0)))
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # from here on the most memory is noted anew
    before = most_memory()
    started = time.perf_counter()
    next(iter(make(count, start)))
    found.put((time.perf_counter() - started, most_memory() - before))


def most_memory() -> float:
    """The most that this process has had, in megabytes (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    """Measures each in processes of its own, in turn, and prints medians and spreads."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--count", type=int, default=10**8, help="samples; ours is measured with ten times as many too")
    arguments = parser.parse_args()
    count, more = arguments.count, arguments.count * 10
    cases = [("ours", more, 0), ("ours", more, more // 10 * 7), ("ours", count, 0), ("DistributedSampler", count, 0)]
    measured: dict[tuple[str, int, int], list[tuple[float, float]]] = {case: [] for case in cases}
    forking = multiprocessing.get_context("fork")
    for repeat in range(arguments.repeats):
        for case in cases:
            print(f"\r{repeat + 1}/{arguments.repeats} {case[0]:<20} {case[1]:>14,}", end="", file=sys.stderr)
            found: multiprocessing.Queue[tuple[float, float]] = forking.Queue()
            process = forking.Process(target=measure, args=(*case, found))
            process.start()
            measured[case].append(found.get())
            process.join()
    print("\r", end="", file=sys.stderr)
    table = Table("order", "samples", "from sample", "first batch, ms", "memory, MB", title=f"rank 3 of {WORLD}")
    for (whose, samples, start), pairs in measured.items():
        seconds, megabytes = zip(*pairs, strict=True)
        milliseconds = spread([1000 * one for one in seconds])
        table.add_row(whose, f"{samples:,}", f"{start:,}", milliseconds, spread(list(megabytes)))
    Console(width=100).print(table)


def spread(values: list[float]) -> str:
    """Median, and least to most."""
    return f"{statistics.median(values):,.1f} ({min(values):,.1f} to {max(values):,.1f})"


if __name__ == "__main__":
    main()
