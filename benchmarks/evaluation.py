"""A metric with 1 to 4 processes: Rankzero compared with DistributedSampler, which counts some samples twice.

python benchmarks/evaluation.py              # 1,001 validation samples
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ROOT = Path(__file__).parent.parent
COUNT, BATCH = 1001, 16


class Errors(LightningModule):
    """Model that learns nothing; its error differs from sample to sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.weight * 0

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("error", batch[0].square().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Numbers(LightningDataModule):
    """Data module in which sample i is i / 1,000."""

    def __init__(self, count: int = COUNT) -> None:
        super().__init__()
        self.data = TensorDataset(torch.arange(count) / 1000)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(TensorDataset(torch.zeros(BATCH)), batch_size=BATCH)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.data, batch_size=BATCH)


def rankzero_metric(count: int, world: int) -> float:
    """Returns the metric that a run with `world` processes reports."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "launch/fit.py"), "--model", "evaluation.Errors", "--data"]
        command += ["evaluation.Numbers", f"--data.count={count}", "--epochs", "1", "--devices", str(world)]
        command += ["--root", folder, "--run", "x", "--accelerator", "cpu", "--batch_size", str(BATCH // world)]
        subprocess.run(command, cwd=Path(__file__).parent, check=True, capture_output=True)
        summary = json.loads((Path(folder) / "x/summary.json").read_text())
    return float(summary["metrics"]["error"])


def sampler_metric(count: int, world: int) -> float:
    """Returns the mean over all samples that DistributedSampler assigns, as `sync_dist=True` computes it."""
    data = Numbers(count).data
    sums = torch.zeros(2)
    for rank in range(world):
        sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=False)
        for (batch,) in DataLoader(data, batch_size=BATCH, sampler=sampler):
            sums += torch.tensor([batch.square().sum(), len(batch)])
    return float(sums[0] / sums[1])


def main() -> None:
    """Computes the metric both ways, and prints the results beside the exact value."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 3, 4], metavar="N")
    arguments = parser.parse_args()
    count = arguments.count
    exact = float((torch.arange(count, dtype=torch.float64) / 1000).square().mean())
    table = Table(
        "processes", "ours", "off by", "DistributedSampler", "off by", title=f"{count:,} samples, {exact:.9f}"
    )
    for world in arguments.worlds:
        rankzero, sampler = rankzero_metric(count, world), sampler_metric(count, world)
        table.add_row(
            f"{world}", f"{rankzero:.9f}", f"{rankzero - exact:.1e}", f"{sampler:.9f}", f"{sampler - exact:.1e}"
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
