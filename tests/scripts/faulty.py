"""Runs a command of Rankzero in a process with planted faults.

FAULT=torch,clock python faulty.py preflight --nodes 2 ...
"""

import importlib
import os
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2] / "project"), str(Path(__file__).parents[2])]


def other_torch() -> None:
    """Reports another version of torch."""
    import torch

    torch.__version__ = "2.14.0"


def clock_ahead() -> None:
    """Sets the clock of this process 90 s ahead."""
    system_time = time.time
    time.time = lambda: system_time() + 90


def slow() -> None:
    """Makes each training step take three times as long, as on a throttled processor."""
    from lightning_modules import ResNet

    step = ResNet.training_step

    def slow_step(self: ResNet, *arguments: object) -> object:
        started = time.perf_counter()
        result = step(self, *arguments)
        time.sleep(5 * (time.perf_counter() - started))  # the forward pass is less than half of a step
        return result

    ResNet.training_step = slow_step


FAULTS = {"torch": other_torch, "clock": clock_ahead, "slow": slow}

if __name__ == "__main__":
    for fault in filter(None, os.environ.get("FAULT", "").split(",")):
        FAULTS[fault]()
    command = importlib.import_module(f"rankzero.commands.{sys.argv[1]}")
    sys.exit(command.main(sys.argv[2:]))
