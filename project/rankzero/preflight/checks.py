"""The order of the checks: all of them before a run, or the quick ones at the start of each run."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.seed import isolate_rng

from rankzero.distributed.coordinator import Coordinator
from rankzero.distributed.devices import WorldInfo
from rankzero.distributed.monitoring.slow_ranks import SLOW_FACTOR
from rankzero.distributed.process_group import destroy_process_group
from rankzero.distributed.session import Session
from rankzero.messages import Exit, RequestError, print_line
from rankzero.preflight.bandwidth import check_collectives
from rankzero.preflight.check import FAIL, SKIPPED, WARN, Check, gather
from rankzero.preflight.disks import (
    SLOW_FSYNC_SECONDS,
    SLOW_IMPORT_SECONDS,
    check_data,
    check_imports,
    check_run_directory,
)
from rankzero.preflight.environment import CLOCK_SECONDS, check_environment
from rankzero.preflight.launcher import check_launcher, check_processes
from rankzero.preflight.links import SLOW_LINK_FACTOR, check_links
from rankzero.preflight.message_passing import check_message_passing
from rankzero.preflight.report import Report
from rankzero.preflight.room import check_step, check_workers
from rankzero.preflight.trial import Trial
from rankzero.sampling.plan import SamplingPlan

COLLECTIVE_SECONDS = 60
"""Time limit of a message or a collective."""

STATES_PER_WEIGHT = 3
"""Numbers that a checkpoint holds for each weight, with the two states of Adam."""


class Subject(NamedTuple):
    """What a preflight checks: a model and its data, which `check_all` uses up, and the settings of the run.

    Args:
        model: The model.
        data: Its data module, training loaders, or None if the model has loaders of its own.
        plan: Batch sizes and seed of the run, which no loader has used yet.
        config: The settings of the run: name, such as `trainer.max_epochs`, -> value.
        root: Folder of the runs.
        keep: Number of checkpoints that are kept.
        precision: Argument of the Trainer; None for its default.
    """

    model: LightningModule
    data: Any
    plan: SamplingPlan
    config: Mapping[str, Any]
    root: Path
    keep: int
    precision: Any = None


class Options(NamedTuple):
    """How the network is measured.

    Args:
        pairs: `quick`, `all` or `off`, see `check_links`.
        warn_gbps: Bandwidth in Gbit/s below which a check warns.
        fail_gbps: Bandwidth in Gbit/s below which a check fails.
    """

    pairs: str = "quick"
    warn_gbps: float = 1.0
    fail_gbps: float = 0.5


def thresholds(options: Options) -> dict[str, Any]:
    """Returns the thresholds of all checks, by name."""
    return {
        **options._asdict(),
        "slow_link_factor": SLOW_LINK_FACTOR,
        "slow_rank_factor": SLOW_FACTOR,
        "clock_seconds": CLOCK_SECONDS,
        "fsync_seconds": SLOW_FSYNC_SECONDS,
        "import_seconds": SLOW_IMPORT_SECONDS,
        "collective_seconds": COLLECTIVE_SECONDS,
    }


def check_all(
    coordinator: Coordinator,
    world: WorldInfo,
    subject: Subject,
    options: Options,
    report: Report,
    start_seconds: float | None = None,
    import_seconds: float | None = None,
) -> Exit:
    """Runs all checks, prints them and the verdict. All ranks must call.

    Args:
        coordinator: The processes.
        world: The devices of all processes.
        subject: What is checked.
        options: How the network is measured.
        report: Receives the checks.
        start_seconds: Seconds from the start of this process to the end of the rendezvous; None if unknown.
        import_seconds: Seconds that the import of torch took; None if unknown.

    Returns:
        0 if all processes can train together, 1 if not.
    """
    checks: tuple[Callable[[], Check], ...] = (
        lambda: check_launcher(coordinator, world),
        lambda: check_processes(coordinator, world, start_seconds),
        lambda: check_environment(coordinator, world, subject.config),
    )
    if not any(report.add(check()).status == FAIL for check in checks):
        _check_network(coordinator, world, subject.model, options, report)
        gradient_bytes = _gradient_bytes(subject.model)
        report.add(check_run_directory(coordinator, subject.root, STATES_PER_WEIGHT * gradient_bytes, subject.keep))
        report.add(check_imports(coordinator, import_seconds))
        _check_training(coordinator, world, subject, report)
    code = report.verdict()
    coordinator.all_gather_object(None)  # rank zero has written its file
    return code


def check_before_fit(mode: str, session: Session, subject: Subject) -> None:
    """Checks the ranks before a run, and prints what may matter. All ranks must call.

    Args:
        mode: `quick` compares the ranks and prints only differences, `full` runs all checks on copies of model and
            data, `off` does nothing.
        session: The processes.
        subject: The run.

    Raises:
        RequestError: The ranks cannot train together.
    """
    coordinator, world = session.coordinator, session.world
    if mode == "full":
        report = Report(prints=coordinator.launch.rank == 0)
        with isolate_rng():
            copies = coordinator.run_on_all_ranks(lambda: copy.deepcopy((subject.model, subject.data)))
            copied = subject._replace(model=copies[0], data=copies[1], plan=dataclasses.replace(subject.plan))
            code = check_all(coordinator, world, copied, Options(), report)
        if code != Exit.FINISHED:
            raise RequestError("--preflight full", "the checks above failed", "follow the advice above")
    elif mode == "quick" and world.size > 1:
        _compare_ranks(coordinator, world, subject.config)


def _compare_ranks(coordinator: Coordinator, world: WorldInfo, config: Mapping[str, Any]) -> None:
    """Prints differences between the ranks that may matter.

    Raises:
        RequestError: The ranks must not train together.
    """
    for check in (check_launcher(coordinator, world), check_environment(coordinator, world, config)):
        if check.status == FAIL:
            found = "\n".join([check.summary, *check.details])
            advice = "\n".join([*check.advice, "or, if the difference is intended, --preflight off"])
            raise RequestError("to train with all ranks", found, advice)
        if check.status == WARN and coordinator.launch.rank == 0:
            print_line("\n".join([f"rankzero: {check.summary}", *(f"  {line}" for line in check.details)]))


def _check_network(
    coordinator: Coordinator, world: WorldInfo, model: LightningModule, options: Options, report: Report
) -> None:
    names = ("gloo messages", "nccl messages", "collectives", "links")
    if world.size == 1:
        for name in names:
            report.add(Check(name, SKIPPED, "there is only one process"))
        return
    uses_nccl = world.backend == "nccl"
    device = torch.device("cuda", world.index) if uses_nccl else torch.device("cpu")
    groups: dict[str, Any] = {}

    def connect() -> None:
        coordinator.init_process_group(world.backend, device, timedelta(seconds=COLLECTIVE_SECONDS))
        groups[world.backend] = dist.group.WORLD
        if uses_nccl:
            groups["gloo"] = dist.new_group(backend="gloo", timeout=timedelta(seconds=COLLECTIVE_SECONDS))

    def send(backend: str, device: torch.device) -> Check:
        return check_message_passing(coordinator, backend, groups[backend], device, report.notify)

    def send_by_nccl() -> Check:
        if not uses_nccl:
            return Check("nccl messages", SKIPPED, f"the run communicates by {world.backend} on {world.accelerator}")
        return send("nccl", device)

    _, errors = gather(coordinator, connect)
    if errors:
        hosts = [member.host for member in coordinator.members]
        details = [f"rank {rank} on {hosts[rank]}: {text.splitlines()[0]}" for rank, text in errors.items()]
        advice = ("check the network and the firewall between these hosts; --interface NAME selects a network",)
        report.add(Check(names[0], FAIL, "the ranks cannot connect to one another", details, advice))
        return
    gradient_bytes, name, limits = _gradient_bytes(model), type(model).__name__, (options.warn_gbps, options.fail_gbps)
    checks: tuple[Callable[[], Check], ...] = (
        lambda: send("gloo", torch.device("cpu")),
        send_by_nccl,
        lambda: check_collectives(coordinator, device, *limits, gradient_bytes, name),
        lambda: check_links(coordinator, device, options.pairs, *limits),
    )
    for check in checks:
        if report.add(check()).blocks:
            break
    destroy_process_group(after_error=False)


def _check_training(coordinator: Coordinator, world: WorldInfo, subject: Subject, report: Report) -> None:
    """Checks the data and a step of the model."""
    trials: list[Trial] = []

    def prepare() -> None:
        trial = Trial(coordinator.launch, world, subject.model, subject.data, subject.plan, subject.precision)
        trial.prepare_data()
        trials.append(trial)

    _, errors = gather(coordinator, prepare)
    loaded: list[Any] = []
    if not errors:
        loaded, errors = gather(coordinator, trials[0].load_batch)
    if report.add(check_data(coordinator, [values["data"] for values in loaded if values], errors)).status != FAIL:
        report.add(check_workers(coordinator, loaded))
        report.add(check_step(coordinator, trials[0]))


def _gradient_bytes(model: LightningModule) -> int:
    return sum(weight.nbytes for weight in model.parameters() if weight.requires_grad)
