"""The command `preflight`: checks whether all processes can train together, and trains nothing."""

import time
from collections.abc import Sequence
from pathlib import Path

import data_modules
import lightning_modules
from rankzero.cli.arguments import Arguments
from rankzero.cli.command import Command
from rankzero.commands.fast_imports import fast_imports
from rankzero.commands.start import start
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.stop_and_failure.error_reporter import refuse
from rankzero.distributed.world import World
from rankzero.messages import CannotStart, Exit, RequestError
from rankzero.preflight.check import FAIL, OK, Check, Report

STARTED = time.monotonic()

PREFLIGHT = Command(
    name="preflight",
    purpose="check whether all processes can train together, with fit's flags",
    examples=(
        "python launch/preflight.py --devices 2",
        "srun --nodes=2 --ntasks-per-node=4 python launch/preflight.py --model ResNet --data FashionMNIST",
        "torchrun --nproc-per-node 2 launch/preflight.py --json preflight.json --pairs all",
    ),
    models=lightning_modules,
    data=data_modules,
    default_model="ResNet",
    default_data="Digits",
)


def preflight(flags: Arguments, world: World) -> int:
    """Imports torch, after the flags have been checked, and runs the checks."""
    connected = time.monotonic()
    with fast_imports():
        import torch  # noqa: F401  # timed

        imported = time.monotonic()
        from rankzero.commands.implementations.checking import run_checks

    return run_checks(flags, world, round(connected - STARTED, 3), imported - connected)


def report_failed_rendezvous(error: CannotStart, flags: Arguments, launch: Launch) -> int:
    """Reports that the rendezvous has failed, also as JSON, and returns the exit code."""
    if flags.get("json"):  # written by each rank, because rank zero may be missing
        report = Report(prints=True, file=Path(flags.get("json")))
        summary = f"{launch.launcher} ({launch.evidence}): {launch.shape}"
        launcher = Check("launcher", OK, summary, values={"variables": dict(launch.variables)})
        found, advice = (error.found, [error.instead]) if isinstance(error, RequestError) else (str(error), [])
        report.checks = {"launcher": launcher, "rendezvous": Check("rendezvous", FAIL, found, advice=advice)}
        report.write(complete=True)
    return refuse(error, launch, Exit.FAILED)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments, by default `sys.argv[1:]`, and returns its exit code."""
    return start(PREFLIGHT, preflight, arguments, report_failed_rendezvous)
