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

from rankzero.distributed.monitoring.slow_ranks import SLOW_FACTOR
from rankzero.distributed.process_group import destroy_process_group
from rankzero.distributed.session import Session
from rankzero.messages import Exit, RequestError, print_error
from rankzero.preflight.bandwidth import check_collectives
from rankzero.preflight.check import FAIL, NETWORK_ADVICE, SKIPPED, WARN, Check, error_lines, gather
from rankzero.preflight.environment import CLOCK_SECONDS, check_environment
from rankzero.preflight.links import SLOW_LINK_FACTOR, check_links
from rankzero.preflight.loading import check_data, check_workers
from rankzero.preflight.message_passing import check_message_passing
from rankzero.preflight.processes import SLOW_IMPORT_SECONDS, check_imports, check_launcher, check_processes
from rankzero.preflight.report import Report
from rankzero.preflight.run_directory import SLOW_FSYNC_SECONDS, check_run_directory
from rankzero.preflight.trial import Trial, check_steps
from rankzero.sampling.plan import SamplingPlan

COLLECTIVE_SECONDS = 60
"""Time limit of a message or a collective."""


class PlannedRun(NamedTuple):
    """A run that has not begun.

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

    @property
    def gradient_bytes(self) -> int:
        """Size of the gradients in bytes."""
        return sum(weight.nbytes for weight in self.model.parameters() if weight.requires_grad)

    @property
    def checkpoint_bytes(self) -> int:
        """Size of a checkpoint in bytes, if the optimizer has two states per trained weight, as Adam has."""
        return sum(weight.nbytes for weight in self.model.parameters()) + 2 * self.gradient_bytes


class NetworkOptions(NamedTuple):
    """How the network is measured.

    Args:
        pairs: `quick`, `all` or `off`, see `check_links`.
        warn_gbps: Bandwidth in Gbit/s below which a check warns.
        fail_gbps: Bandwidth in Gbit/s below which a check fails.
    """

    pairs: str = "quick"
    warn_gbps: float = 1.0
    fail_gbps: float = 0.5


def thresholds(options: NetworkOptions) -> dict[str, Any]:
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


def check_before_fit(mode: str, session: Session, run: PlannedRun) -> None:
    """Compares the ranks, or runs all checks, before training. All ranks must call.

    Args:
        mode: `quick` compares the ranks and prints only differences, `full` runs all checks on copies of the model and
            the data, `off` does nothing.
        session: The processes.
        run: The run.

    Raises:
        RequestError: The ranks cannot train together.
    """
    if mode == "full":
        report = Report(prints=session.coordinator.launch.rank == 0, thresholds=thresholds(NetworkOptions()))
        with isolate_rng():
            model, data = session.coordinator.run_on_all_ranks(lambda: copy.deepcopy((run.model, run.data)))
            copied = run._replace(model=model, data=data, plan=dataclasses.replace(run.plan))
            code = check_all(session, copied, NetworkOptions(), report)
        if code != Exit.FINISHED:
            failed = ", ".join(report.names(FAIL))
            found = f"not fit to train: {failed} failed"
            raise RequestError("--preflight full", found, "follow the advice above, or --preflight off")
    elif mode == "quick" and session.world.size > 1:
        _compare_ranks(session, run)


def _compare_ranks(session: Session, run: PlannedRun) -> None:
    """Prints differences between the ranks that may matter, and settings that cost speed.

    Raises:
        RequestError: The ranks must not train together.
    """
    coordinator, world = session.coordinator, session.world
    for check in (check_launcher(coordinator, world), check_environment(coordinator, world, run.config)):
        if check.status == FAIL:
            escape = ["or, if the difference is intended, --preflight off"] * (check.name == "environment")
            found, advice = [check.summary, *check.details], [*check.advice, *escape]
            raise RequestError(f"training on {world.size} ranks", "\n".join(found), "\n".join(advice))
        if check.status == WARN and coordinator.launch.rank == 0:
            problem = check.summary if check.name == "environment" else "settings of the launcher cost speed"
            print_error("\n".join([f"warning: {problem}", *(f"  {line}" for line in [*check.details, *check.advice])]))


def check_all(
    session: Session,
    run: PlannedRun,
    options: NetworkOptions,
    report: Report,
    start_seconds: float | None = None,
    import_seconds: float | None = None,
) -> Exit:
    """Runs all checks, prints them and the verdict. All ranks must call.

    Args:
        session: The processes.
        run: The run, whose model and data cannot be used afterwards.
        options: How the network is measured.
        report: Receives the checks.
        start_seconds: Seconds from the start of this process to the end of the rendezvous; None if unknown.
        import_seconds: Seconds that the import of torch took; None if unknown.

    Returns:
        0 if all processes can train together, 1 if not.
    """
    coordinator, world = session.coordinator, session.world
    checks: tuple[Callable[[], Check], ...] = (
        lambda: check_launcher(coordinator, world),
        lambda: check_processes(coordinator, world, start_seconds),
        lambda: check_environment(coordinator, world, run.config),
    )
    if not any(report.add(check()).status == FAIL for check in checks):
        _check_network(session, run, options, report)
        report.add(check_run_directory(coordinator, run.root, run.checkpoint_bytes, run.keep))
        report.add(check_imports(coordinator, import_seconds))
        _check_training(session, run, report)
    code = report.verdict()
    coordinator.all_gather_object(None)  # rank zero has written its file
    return code


def _check_network(session: Session, run: PlannedRun, options: NetworkOptions, report: Report) -> None:
    coordinator, world = session.coordinator, session.world
    if world.size == 1:
        for name in ("gloo messages", "nccl messages", "collectives", "links"):
            report.add(Check(name, SKIPPED, "there is only one process"))
        return
    uses_nccl, timeout = world.backend == "nccl", timedelta(seconds=COLLECTIVE_SECONDS)
    device = torch.device("cuda", world.index) if uses_nccl else torch.device("cpu")
    groups: dict[str, Any] = {}

    def connect() -> None:
        coordinator.init_process_group(world.backend, device, timeout)
        groups[world.backend] = dist.group.WORLD
        if uses_nccl:
            groups["gloo"] = dist.new_group(backend="gloo", timeout=timeout)

    def send_by_gloo() -> Check:
        return check_message_passing(coordinator, "gloo", groups["gloo"], torch.device("cpu"), report.notify)

    def send_by_nccl() -> Check:
        if not uses_nccl:
            return Check("nccl messages", SKIPPED, f"the run communicates by {world.backend} on {world.accelerator}")
        return check_message_passing(coordinator, "nccl", groups["nccl"], device, report.notify)

    _, errors = gather(coordinator, connect)
    if errors:
        summary = "the ranks cannot connect to one another"
        report.add(Check("gloo messages", FAIL, summary, error_lines(errors, coordinator.hosts), [NETWORK_ADVICE]))
    else:
        limits, model = (options.warn_gbps, options.fail_gbps), type(run.model).__name__
        checks: tuple[Callable[[], Check], ...] = (
            send_by_gloo,
            send_by_nccl,
            lambda: check_collectives(coordinator, device, *limits, run.gradient_bytes, model),
            lambda: check_links(coordinator, device, options.pairs, *limits),
        )
        for check in checks:
            if report.add(check()).blocks:
                break
    destroy_process_group(after_error=bool(errors))


def _check_training(session: Session, run: PlannedRun, report: Report) -> None:
    """Checks the data and some steps of the model."""
    coordinator = session.coordinator
    trials: list[Trial] = []

    def prepare() -> None:
        trial = Trial(coordinator.launch, session.world, run.model, run.data, run.plan, run.precision)
        trial.prepare_data()
        trials.append(trial)

    _, errors = gather(coordinator, prepare)
    loaded: list[Any] = []
    if not errors:
        loaded, errors = gather(coordinator, trials[0].load_batch)
    fingerprints = [values["data"] for values in loaded if values]
    if report.add(check_data(fingerprints, errors, coordinator.hosts)).status != FAIL:
        own = loaded[coordinator.launch.rank or 0]
        report.add(check_workers(coordinator, own["workers"], own["batch_bytes"]))
        report.add(check_steps(coordinator, trials[0]))
