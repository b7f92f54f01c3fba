"""Time and memory for the first batch: Rankzero's order of samples compared with DistributedSampler's.

python benchmarks/sampling.py                # 10^9 and 10^8 samples; each is measured in 5 separate processes
python benchmarks/sampling.py --pairs 1 --count 1000000
"""

import gc
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from contest import ROOT, Comparison, parser
from torch.utils.data import DataLoader, Dataset, DistributedSampler

sys.path.insert(0, str(ROOT / "project"))
sys.path.insert(0, str(ROOT))

from rankzero.sampling.batch_sampler import Position
from rankzero.sampling.plan import SamplingPlan

BATCH, WORLD = 256, 8


class Virtual(Dataset[int]):
    """Data set of any length that stores nothing: sample i is i."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


def rankzero_loader(count: int, start: int = 0) -> Iterable[torch.Tensor]:
    """Returns a user's loader as a run reads it, on rank 3 of 8, starting at position `start` of the epoch."""
    plan = SamplingPlan(rank=3, world_size=WORLD, seed=0)
    plan.start_positions = [Position(0, start // (BATCH * WORLD), start)]
    loader: Iterable[torch.Tensor] = plan.wrap(  # type: ignore[assignment]
        DataLoader(Virtual(count), batch_size=BATCH, shuffle=True), training=True
    )
    return loader


def tutorial_loader(count: int) -> Iterable[torch.Tensor]:
    """Returns a loader as in a DDP tutorial; it can start only at the beginning of an epoch."""
    data = Virtual(count)
    return DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, num_replicas=WORLD, rank=3))


Loader = Callable[..., Iterable[torch.Tensor]]


def milliseconds(make_loader: Loader, *arguments: int) -> float:
    """Returns the milliseconds from creating a loader to its first batch, after a tiny loader as warm-up."""
    next(iter(make_loader(BATCH * WORLD)))
    gc.collect()
    started = time.perf_counter()
    next(iter(make_loader(*arguments)))
    return 1000 * (time.perf_counter() - started)


def megabytes(make_loader: Loader, *arguments: int) -> float:
    """Returns the additional peak memory in megabytes for the first batch; at least 1 kilobyte, Linux's resolution."""
    next(iter(make_loader(BATCH * WORLD)))
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak memory that Linux reports
    previous = peak_memory()
    next(iter(make_loader(*arguments)))
    return max(peak_memory() - previous, 1 / 1024)


def peak_memory() -> float:
    """Returns the peak memory of this process, in megabytes (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def in_subprocess(measure: Callable[..., float], *arguments: object) -> float:
    """Returns the result of `measure`, called in a separate process."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(measure, arguments)


def make_comparison(
    measure: Callable[..., float], name: str, title: str, unit: str, limit: float, count: int
) -> Comparison:
    """Returns a comparison of DistributedSampler with Rankzero, also for ten times as many samples and a late start."""
    larger_count = 10 * count
    cases = {
        f"ours, {count:,} samples": (rankzero_loader, count),
        f"ours, {larger_count:,}": (rankzero_loader, larger_count),
        f"ours, {larger_count:,}, from {larger_count // 10 * 7:,} on": (
            rankzero_loader,
            larger_count,
            larger_count // 10 * 7,
        ),
    }
    return Comparison(
        name=name,
        title=f"{title}, on rank 3 of {WORLD}, {BATCH} samples a batch",
        unit=unit,
        measure={
            name: partial(in_subprocess, measure, *case)
            for name, case in {**cases, f"DistributedSampler, {count:,}": (tutorial_loader, count)}.items()
        },
        limits=dict.fromkeys(cases, limit),
    )


def main() -> None:
    """Measures time and memory."""
    flags = parser(__doc__)
    flags.add_argument("--count", type=int, default=10**8, help="samples; ours is measured with ten times as many too")
    arguments = flags.parse_args()
    count = arguments.count
    for comparison in (
        make_comparison(milliseconds, "first-batch", "Time to the first batch", "milliseconds", 100, count),
        make_comparison(megabytes, "first-batch-memory", "Memory for the first batch", "megabytes", 50, count),
    ):
        comparison.run(arguments.pairs, arguments.json_dir)


if __name__ == "__main__":
    main()
