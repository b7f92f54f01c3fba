"""The result that every way to start a run must reach: the weights that one process learns, to 1e-6."""

from pathlib import Path
from typing import Any

import pytest
import torch

from running import BIN, Result, fit, processes_in, script, weights
from system.slurm import wait_until

TRAIN = (script("fit"), "--model", "MLP", "--data", "Toy", "--epochs", "1", "--global_batch_size", "64")
PYTHON, TORCHRUN = str(BIN / "python"), str(BIN / "torchrun")

Reference = tuple[dict[str, torch.Tensor], dict[str, float]]
"""The weights that one process learns, and the metrics of two, whose train/loss covers rank zero's share."""


def train_reference(folder: Path) -> Reference:
    """Trains on one machine without a launcher, on one process and on two."""
    fit(*TRAIN[1:], "--run", "one", folder=folder)
    result = fit(*TRAIN[1:], "--run", "two", "--devices", "2", folder=folder)
    return weights(folder / "runs/one"), result.summary("two")["metrics"]


def check(
    folder: Path, printed: str, reference: Reference, launcher: str, shape: tuple[int, ...], *also_printed: str
) -> dict[str, Any]:
    """Checks that a run learned what one process learns from each sample once, and left no process.

    It must also have printed one line about its launcher, and nothing about a missing key.

    Args:
        folder: Working directory of the run.
        printed: Output of all processes.
        reference: Result of `train_reference`.
        launcher: Launcher that the run must have detected.
        shape: Number of processes on each node.
        also_printed: Lines that the run must have printed besides.

    Returns:
        The run's summary.
    """
    (run_folder,) = (folder / "runs").iterdir()
    found, (expected, metrics) = weights(run_folder), reference
    assert all(torch.allclose(found[name], expected[name], atol=1e-6, rtol=0) for name in expected)
    summary = Result(0, "", "", folder).summary()
    assert (summary["launcher"], summary["nodes"], summary["world_size"]) == (launcher, len(shape), sum(shape))
    assert summary["ledger"] == ["epoch 1: 2,048 of 2,048 samples, each once"]
    wait_until(lambda: not processes_in(folder), "the end of all processes", 20)
    names = metrics if sum(shape) == 2 else ("val/loss", "val/mae")
    for name in names:
        assert summary["metrics"][name] == pytest.approx(metrics[name], abs=1e-6)
    lines = [line for line in printed.splitlines() if line.startswith("rankzero:") and line not in also_printed]
    assert len(lines) == 1 and lines[0].startswith(f"rankzero: {launcher} ("), printed
    assert all(printed.count(line) == 1 for line in also_printed), printed
    processes = (
        f" x {shape[0]} process" if len(set(shape)) == 1 else f" with {', '.join(map(str, shape[:-1]))} and {shape[-1]}"
    )
    assert f"{len(shape)} node{'s' * (len(shape) > 1)}{processes}" in lines[0] and "rendezvous at" in lines[0], lines
    assert printed.count(f"run {run_folder.name}: finished") == 1
    assert len(list((run_folder / "logs").iterdir())) == sum(shape)
    assert len(list((run_folder / "tensorboard").glob("events.*"))) == 1
    return summary
