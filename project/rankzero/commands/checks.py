"""Runs the checks of a preflight in order."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule

from rankzero.cli.arguments import Arguments
from rankzero.cli.lightning_cli import RankzeroCLI
from rankzero.distributed.process.quiet import silence_warnings
from rankzero.distributed.rendezvous.client import RendezvousResult
from rankzero.distributed.session import Session
from rankzero.preflight.bandwidth import check_collectives
from rankzero.preflight.check import FAIL
from rankzero.preflight.disks import check_data, check_imports, check_run_directory
from rankzero.preflight.environment import check_environment
from rankzero.preflight.launcher import check_launcher
from rankzero.preflight.links import check_links
from rankzero.preflight.message_passing import check_message_passing
from rankzero.preflight.processes import check_processes
from rankzero.preflight.report import Report
from rankzero.preflight.room import check_step, check_workers
from rankzero.runs.stored_config import dump_config
from rankzero.sampling.plan import SamplingPlan

COLLECTIVE_SECONDS = 60
"""Time limit of a message or a collective."""

STATES_PER_WEIGHT = 3
"""Numbers that a checkpoint holds for each weight, with the states of Adam."""


def run_checks(
    flags: Arguments, rendezvous_result: RendezvousResult, rendezvous_seconds: float, import_seconds: float
) -> int:
    """Runs all checks, prints them and the verdict. All ranks must call.

    Args:
        flags: The parsed command line.
        rendezvous_result: The processes.
        rendezvous_seconds: Seconds from the start of this process to the end of the rendezvous.
        import_seconds: Seconds that the import of torch took.

    Returns:
        0 if all processes can train together, 1 if not.

    Raises:
        CannotStart: The request cannot be fulfilled, for example because the model does not exist.
    """
    silence_warnings(rendezvous_result.launch.rank or 0)
    if flags.only_prints:
        RankzeroCLI(flags)  # prints and exits
    with Session.for_command(flags.requested_world, rendezvous_result) as session:
        coordinator, world = session.coordinator, session.world
        rank = coordinator.launch.rank or 0
        report = Report(prints=rank == 0)
        report.add(check_launcher(coordinator, world))
        report.add(check_processes(coordinator, world, rendezvous_seconds))
        cli = coordinator.run_on_all_ranks(lambda: RankzeroCLI(flags))
        report.add(check_environment(coordinator, world, dump_config(cli.stored_config)))
        warn_gbps, fail_gbps = flags.get("warn_gbps"), flags.get("fail_gbps")
        gradient_bytes = sum(weight.nbytes for weight in cli.model.parameters() if weight.requires_grad)
        device = torch.device(world.accelerator, world.index) if world.accelerator == "cuda" else torch.device("cpu")
        if world.size > 1 and not report.has_failed:
            coordinator.init_process_group(world.backend, device, timedelta(seconds=COLLECTIVE_SECONDS))
        model_name = type(cli.model).__name__
        for check in (
            lambda: check_message_passing(coordinator, device, world.backend, report.notify),
            lambda: check_collectives(coordinator, device, warn_gbps, fail_gbps, gradient_bytes, model_name),
            lambda: check_links(coordinator, device, flags.get("pairs"), warn_gbps, fail_gbps),
        ):
            if not any(done.status == FAIL for done in report.checks):
                report.add(check())
        root, keep = Path(flags.get("root")), flags.get("keep")
        report.add(check_run_directory(coordinator, root, STATES_PER_WEIGHT * gradient_bytes, keep))
        report.add(check_imports(coordinator, import_seconds))
        _check_training(flags, session, cli, report)
        code = report.verdict()
        if rank == 0 and flags.get("json"):
            thresholds = {"warn_gbps": warn_gbps, "fail_gbps": fail_gbps, "pairs": flags.get("pairs")}
            report.write(Path(flags.get("json")), {"thresholds": thresholds, "verdict": int(code)})
        coordinator.all_gather_object(None)
        return code


def _check_training(flags: Arguments, session: Session, cli: RankzeroCLI, report: Report) -> None:
    """Checks the data and a step of the model. All ranks must call."""
    coordinator, world = session.coordinator, session.world
    plan = SamplingPlan(
        rank=coordinator.launch.rank or 0,
        world_size=world.size,
        batch_size=flags.get("batch_size"),
        global_batch_size=flags.get("global_batch_size"),
        data_batch_size=cli.data_batch_size,
        max_device_batch_size=flags.get("max_device_batch_size"),
    )
    batch, workers, error = None, 0, None
    try:
        batch, workers = _first_batch(cli.model, cli.datamodule, plan, coordinator.all_gather_object)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    report.add(check_data(coordinator, plan.data, error))
    if report.checks[-1].status == FAIL:
        return
    report.add(check_workers(coordinator, workers, _bytes_of(batch)))
    settings = {"precision": cli.config.trainer.precision} if cli.config.trainer.precision else {}
    report.add(check_step(coordinator, world, cli.model, batch, settings))


def _first_batch(
    model: LightningModule,
    datamodule: LightningDataModule | None,
    plan: SamplingPlan,
    all_gather_object: Callable[[Any], list[Any]],
) -> tuple[Any, int]:
    """Returns this rank's first training batch, and the number of loader processes."""
    if datamodule is not None:
        if plan.rank == 0:
            datamodule.prepare_data()
        all_gather_object(None)
        datamodule.setup("fit")
    loader = (datamodule or model).train_dataloader()
    managed = plan.wrap(loader, training=True)
    return next(iter(managed)), int(getattr(loader, "num_workers", 0))  # type: ignore[call-overload]


def _bytes_of(batch: Any) -> int:
    """Returns the size of the tensors in a batch."""
    if isinstance(batch, torch.Tensor):
        return int(batch.nbytes)
    values = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ()
    return sum(map(_bytes_of, values))
