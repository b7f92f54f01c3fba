"""The command `preflight`: checks whether all processes can train together, and trains nothing."""

import time
from collections.abc import Sequence
from pathlib import Path

import data_modules
import lightning_modules
from rankzero.cli.arguments import Arguments
from rankzero.cli.command import Command
from rankzero.commands.start import fast_imports, start
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
    """Imports torch, after the flags have been checked, runs all checks and prints the verdict. All ranks must call.

    Returns:
        0 if all processes can train together, 1 if not.

    Raises:
        CannotStart: The request cannot be fulfilled, for example because the model does not exist.
    """
    connected = time.monotonic()
    with fast_imports():
        import torch  # noqa: F401  # timed

        import_seconds = time.monotonic() - connected
        from rankzero.cli.lightning_cli import RankzeroCLI
        from rankzero.distributed.coordination.session import Session
        from rankzero.distributed.process.quiet import silence_warnings
        from rankzero.preflight.all_checks import NetworkOptions, PlannedRun, check_all, thresholds
        from rankzero.runs.stored_config import flattened
        from rankzero.sampling.generators import global_seed
        from rankzero.sampling.plan import SamplingPlan
        from rankzero.training.speed import layout
    silence_warnings(world.rank)
    if flags.only_prints:
        RankzeroCLI(flags)  # prints and exits
    with Session.for_command(flags.requested_world, world) as session:
        coordinator, world = session.coordinator, session.world
        file = Path(flags.get("json")) if flags.get("json") else None
        coordinator.run_on_rank_zero(lambda: _remove_old_result(file))
        cli = coordinator.run_on_all_ranks(lambda: RankzeroCLI(flags), "building data and model")
        plan = SamplingPlan(
            rank=world.rank,
            world_size=world.size,
            seed=global_seed() or 0,
            batch_size=flags.get("batch_size"),
            global_batch_size=flags.get("global_batch_size"),
            data_batch_size=cli.data_batch_size,
            micro_batches=cli.config.trainer.accumulate_grad_batches,
            max_device_batch_size=flags.get("max_device_batch_size"),
        )
        precision = cli.config.trainer.precision
        if coordinator.broadcast_object(flags.get("fast")) == "yes":
            precision, _ = layout.agree_on_precision(coordinator, world.accelerator, precision)
            layout.apply_layout(cli.model, world.accelerator)
        config, root = flattened(cli.stored_config), Path(flags.get("root"))
        trainer = cli.config.trainer
        settings = {"max_epochs": trainer.max_epochs, "max_steps": trainer.max_steps, "precision": precision}
        run = PlannedRun(cli.model, cli.datamodule, plan, config, root, flags.get("keep"), settings)
        options = NetworkOptions(flags.get("pairs"), flags.get("warn_gbps"), flags.get("fail_gbps"))
        report = Report(world.rank == 0, file, thresholds(options))
        coordinator.share_peers()
        return check_all(session, run, options, report, round(connected - STARTED, 3), import_seconds)


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


def _remove_old_result(file: Path | None) -> None:
    """Removes the result of an earlier preflight, which is not the result of this one, and checks that it is writable.

    Raises:
        RequestError: The file cannot be written.
    """
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        file.touch()
        file.unlink()
    except OSError as error:
        instead = "--json FILE, where FILE is in a folder in which you may write"
        raise RequestError(f"--json {file}", f"the file cannot be written: {error.strerror}", instead) from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments, by default `sys.argv[1:]`, and returns its exit code."""
    return start(PREFLIGHT, preflight, arguments, report_failed_rendezvous)
