"""The order of the checks: all of them before a run, or the quick ones at the start of each run."""

import copy
import dataclasses
import gc
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.seed import isolate_rng
from torch.nn.parameter import is_lazy

from rankzero.distributed.coordination.process_group import destroy_process_group, raising_nccl_errors
from rankzero.distributed.coordination.session import Session
from rankzero.distributed.environments.launch_problems import has_invalid_interface
from rankzero.distributed.monitoring.hangs import SLOW_FACTOR
from rankzero.distributed.timers import TIMERS
from rankzero.messages import AnotherRankFailed, Exit, RequestError, print_error
from rankzero.preflight.check import FAIL, NETWORK_ADVICE, SKIPPED, WARN, Check, Report, error_lines, failure, gather
from rankzero.preflight.environment import (
    CLOCK_SECONDS,
    SLOW_IMPORT_SECONDS,
    check_environment,
    check_imports,
    check_launcher,
    check_processes,
)
from rankzero.preflight.gpus import Link, check_gpus, gather_in_time
from rankzero.preflight.network import SLOW_LINK_FACTOR, check_collectives, check_links, check_message_passing
from rankzero.preflight.run_directory import SLOW_FSYNC_SECONDS, check_run_directory
from rankzero.preflight.training import Trial, check_data, check_steps, check_workers
from rankzero.sampling.plan import SamplingPlan


class PlannedRun(NamedTuple):
    """A run that has not begun.

    Args:
        data: Its data module, training loaders, or None if the model has loaders of its own.
        plan: Batch sizes and seed of the run, which no loader has used yet.
        config: The settings of the run: name, such as `trainer.max_epochs`, -> value.
        keep: Number of checkpoints that are kept.
        trainer_settings: Arguments of the Trainer: `max_epochs`, `max_steps`, `precision`.
        untried: Why the model and the data cannot be tried; empty if they can.
    """

    model: LightningModule
    data: Any
    plan: SamplingPlan
    config: Mapping[str, Any]
    root: Path
    keep: int
    trainer_settings: Mapping[str, Any]
    untried: str = ""

    @property
    def parameters(self) -> dict[str, str]:
        """Shape and type of each parameter of the model, by name."""
        return {
            name: "not initialized"
            if is_lazy(weight)
            else f"{weight.dtype} {list(weight.shape)}".removeprefix("torch.")
            for name, weight in self.model.named_parameters()
        }

    @property
    def gradient_bytes(self) -> int:
        """Size of the gradients in bytes."""
        return sum(weight.nbytes for weight in self.model.parameters() if weight.requires_grad)

    @property
    def checkpoint_bytes(self) -> int:
        """Size of a checkpoint in bytes, if the optimizer has two states per trained weight, as Adam has."""
        return sum(weight.nbytes for weight in self.model.parameters()) + 2 * self.gradient_bytes


class NetworkOptions(NamedTuple):
    """How the network is measured: the mode of `check_links`, and Gbit/s below which checks warn or fail."""

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
        "collective_seconds": TIMERS.message,
    }


def check_before_fit(mode: str, session: Session, run: PlannedRun) -> None:
    """Compares the ranks, or runs all checks, before training. All ranks must call.

    The mode `quick` compares the ranks and prints only differences, `full` runs all checks on copies of the model and
    the data, `off` does nothing.

    Raises:
        RequestError: The ranks cannot train together.
    """
    if mode == "full":
        session.coordinator.share_peers()
        report = Report(prints=session.world.rank == 0, thresholds=thresholds(NetworkOptions()))
        with isolate_rng():
            code = check_all(session, _copy(session, run), NetworkOptions(), report)
            gc.collect()  # the copies refer to one another
        if code != Exit.FINISHED:
            found = f"not fit to train: {', '.join(report.names(FAIL))} failed"
            raise RequestError("--preflight full", found, "follow the advice above, or --preflight off")
    elif mode == "quick" and session.world.size > 1:
        _compare_ranks(session, run)


def _copy(session: Session, run: PlannedRun) -> PlannedRun:
    """Returns the run with copies of model and data, or the reason why they cannot be copied. All ranks must call."""
    copies: list[Any] = []

    def copy_both() -> None:
        data = copy.copy(run.data)
        if isinstance(data, LightningDataModule):
            data.trainer = None  # of an earlier run, which cannot be copied
        copies.extend(copy.deepcopy((run.model, data)))

    _, errors = gather(session.coordinator, copy_both)
    if errors:
        lines = error_lines(errors, session.world.hosts)
        return run._replace(untried=f"the model and the data cannot be copied; {lines[0]}")
    return run._replace(model=copies[0], data=copies[1], plan=dataclasses.replace(run.plan))


def _compare_ranks(session: Session, run: PlannedRun) -> None:
    """Prints differences between the ranks that may matter, and settings that cost speed.

    Raises:
        RequestError: The ranks must not train together.
    """
    coordinator, world = session.coordinator, session.world
    launcher = check_launcher(coordinator, world)
    for check in (launcher, check_environment(coordinator, world, run.config, run.parameters)):
        if check.status == FAIL:
            escape = ["or, if the difference is intended, --preflight off"] * (check.name == "environment")
            found = [check.summary, *check.details] if check.name == "environment" else check.details
            advice = [*check.advice, *escape]
            raise RequestError(f"training on {world.size} ranks", "\n".join(found), "\n".join(advice))
        if check.status == WARN and coordinator.world.rank == 0:
            problem = check.summary if check.name == "environment" else "the launcher's settings may cause problems"
            print_error("\n".join([f"warning: {problem}", *(f"  {line}" for line in [*check.details, *check.advice])]))


def check_all(
    session: Session,
    run: PlannedRun,
    options: NetworkOptions,
    report: Report,
    start_seconds: float | None = None,
    import_seconds: float | None = None,
) -> Exit:
    """Runs all checks, prints them and the verdict. All ranks must call, after `Coordinator.share_peers`.

    Returns 0 if all processes can train together, 1 if not.
    """
    coordinator, world = session.coordinator, session.world
    owns_group = not dist.is_initialized()
    try:
        agreed = coordinator.broadcast_object([options, run.keep, run.checkpoint_bytes])
        options, keep, checkpoint_bytes = NetworkOptions(*agreed[0]), agreed[1], agreed[2]
        report.add(check_launcher(coordinator, world))
        report.add(check_processes(coordinator, world, start_seconds))
        report.add(check_environment(coordinator, world, run.config, run.parameters))
        if not report.names(FAIL):
            gpus, link = check_gpus(coordinator, world)
            report.add(gpus)
            can_communicate = _check_network(session, run, options, report, link)
            if owns_group and not can_communicate and not destroy_process_group(after_error=True):
                run = run._replace(untried="the ranks cannot communicate")
            report.add(check_run_directory(coordinator, run.root, checkpoint_bytes, keep))
            report.add(check_imports(coordinator, import_seconds))
            _check_training(session, run, report, owns_group)
        code = report.verdict()
        coordinator.broadcast_object(None)  # rank zero has written its file
        return code
    except AnotherRankFailed as error:
        advice = ["look at the processes and the logs of the host of this rank"]
        report.add(Check(report.next_name, FAIL, str(error), (), advice))
        report.verdict()
        raise


def _check_network(
    session: Session, run: PlannedRun, options: NetworkOptions, report: Report, link: Link | None
) -> bool:
    """Returns whether the ranks can communicate. Their process group remains."""
    coordinator, world = session.coordinator, session.world
    if world.size == 1:
        for name in ("gloo messages", "nccl messages", "collectives", "links"):
            report.add(Check(name, SKIPPED, "there is only one process"))
        return True
    uses_nccl, timeout = world.backend == "nccl", timedelta(seconds=TIMERS.message + world.size / 4)
    device = torch.device("cuda", world.index) if uses_nccl else torch.device("cpu")
    groups: dict[str, Any] = {}

    def connect() -> None:
        with raising_nccl_errors():
            coordinator.init_process_group(world.backend, device, timeout)
        groups[world.backend] = dist.group.WORLD
        if uses_nccl and not has_invalid_interface():
            groups["gloo"] = dist.new_group(backend="gloo", timeout=timeout)

    def send_by_gloo() -> Check:
        if "gloo" not in groups:
            return Check("gloo messages", SKIPPED, "GLOO_SOCKET_IFNAME is not valid for gloo")
        return check_message_passing(coordinator, "gloo", groups["gloo"], torch.device("cpu"), report.notify)

    def send_by_nccl() -> Check:
        if not uses_nccl:
            return Check("nccl messages", SKIPPED, f"the run communicates by {world.backend} on {world.accelerator}")
        return check_message_passing(coordinator, "nccl", groups["nccl"], device, report.notify)

    _, errors = gather_in_time(coordinator, connect, device, TIMERS.network_check)
    if errors:
        name, summary = f"{world.backend} messages", "the ranks cannot connect to one another"
        report.add(failure(name, summary, errors, coordinator.world.hosts, NETWORK_ADVICE))
        return False
    limits, model = (options.warn_gbps, options.fail_gbps), type(run.model).__name__
    checks: tuple[Callable[[], Check], ...] = (
        send_by_gloo,
        send_by_nccl,
        lambda: check_collectives(coordinator, device, *limits, run.gradient_bytes, model, link),
        lambda: check_links(coordinator, device, options.pairs, *limits),
    )
    return not any(report.add(check()).blocks for check in checks)


def _check_training(session: Session, run: PlannedRun, report: Report, owns_group: bool) -> None:
    """Checks the data and some steps of the model."""
    coordinator = session.coordinator
    if run.untried:
        for name in ("data", "loader processes", "training steps"):
            report.add(Check(name, SKIPPED, run.untried))
        return
    trials: list[Trial] = []

    def build() -> None:
        trials.append(Trial(session.world, run.model, run.data, run.plan, run.trainer_settings))

    _, errors = gather(coordinator, build)
    if errors:
        report.add(failure("training steps", "the Trainer cannot be built", errors, coordinator.world.hosts))
        return
    _, errors = gather(coordinator, trials[0].prepare_data)
    loaded: list[Any] = []
    if not errors:
        loaded, errors = gather(coordinator, trials[0].load_batch)
    if owns_group:
        destroy_process_group(after_error=bool(errors))
    fingerprints = [values["data"] for values in loaded if values]
    if report.add(check_data(fingerprints, errors, coordinator.world.hosts)).status != FAIL:
        own = loaded[coordinator.world.rank]
        report.add(check_workers(coordinator, own["workers"], own["prefetched_bytes"]))
        if owns_group:
            report.add(check_steps(coordinator, trials[0]))
        else:  # Lightning would exchange values in every step, but ranks take different numbers of steps
            report.add(Check("training steps", SKIPPED, "the process group of an earlier run exists"))
