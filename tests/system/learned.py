"""The result that every way to start a run must reach: the weights that one process learns, to 1e-6."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from running import BIN, Result, fit, processes_in, script, wait_until, weights
from stock import differences

TRAIN = (script("fit"), "--model", "MLP", "--data", "Toy", "--epochs", "1", "--global_batch_size", "64")
PYTHON, TORCHRUN = str(BIN / "python"), str(BIN / "torchrun")

OBSERVED = """
import json
from pathlib import Path

import psutil
import torch
from lightning.pytorch import Callback


class Observed(Callback):
    def on_train_end(self, trainer, module):
        connections = psutil.Process().net_connections("inet")
        addresses = [connection.laddr for connection in connections if connection.status == psutil.CONN_LISTEN]
        found = {"threads": torch.get_num_threads(), "listening": addresses}
        Path(f"observed-{trainer.global_rank}.json").write_text(json.dumps(found))
"""
OBSERVE = ("--trainer.callbacks", "observed.Observed")
"""Flags that make each rank record its number of threads and the addresses on which it listens; see `observed`."""

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

    It must also have detected its launcher, started `shape` processes on each node, and printed one line about that,
    besides the lines `also_printed`. Returns the run's summary.
    """
    (run_folder,) = (folder / "runs").iterdir()
    expected, metrics = reference
    assert not differences(expected, weights(run_folder), 1e-6)
    summary = Result(0, "", "", folder).summary()
    assert (summary["launcher"], summary["nodes"], summary["world_size"]) == (launcher, len(shape), sum(shape))
    assert summary["ledger"] == ["epoch 1: 2,048 of 2,048 samples, each once"]
    wait_until(lambda: not processes_in(folder), "the end of all processes")
    names = metrics if sum(shape) == 2 else ("val/loss", "val/mae")
    for name in names:
        assert summary["metrics"][name] == pytest.approx(metrics[name], abs=1e-6)
    also_printed = ("rankzero: loading torch, Lightning, MLP, Toy", *also_printed)
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


def observed(folder: Path, printed: str) -> tuple[list[int], str, list[list[tuple[str, int]]]]:
    """Returns what a run with the flags `OBSERVE` recorded in a folder that contains `OBSERVED` as observed.py.

    This is the number of threads of each rank, the reason in the start line, and the addresses on which each listened.
    """
    files = [folder / f"observed-{rank}.json" for rank in range(len(list(folder.glob("observed-*"))))]
    found = [json.loads(file.read_text()) for file in files]
    threads = [rank["threads"] for rank in found]
    start_line = re.search(r" process(?:es)? on cpu, (\d+) threads?(?: each)? \((.*?)\)[,;]", printed)
    assert start_line and {int(start_line[1])} == set(threads), printed
    return threads, start_line[2], [[tuple(address) for address in rank["listening"]] for rank in found]
