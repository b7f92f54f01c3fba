"""`--explain`: prints the detected launcher and what would start, without a rendezvous. Does not import torch."""

from rankzero.cli.arguments import Arguments
from rankzero.distributed.environments.detect import detect
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.environments.validate import check_world, processes_to_start
from rankzero.distributed.process.threads import choose_threads
from rankzero.distributed.stop_and_failure.error_reporter import is_reporting_rank
from rankzero.distributed.world import World
from rankzero.messages import Exit, RequestError, print_line


def explain(flags: Arguments) -> int:
    """Prints the explanation on the reporting rank and returns the exit code."""
    launch: Launch | None = None
    refusal: RequestError | None = None
    try:
        launch = detect(flags.requested_world)
        check_world(flags.requested_world, launch)
        processes_to_start(flags.requested_world, launch)
    except RequestError as error:
        refusal = error
    if is_reporting_rank(launch):
        print_line("\n".join(_lines(flags, launch, refusal)))
    return Exit.FINISHED


def _lines(flags: Arguments, launch: Launch | None, refusal: RequestError | None) -> list[str]:
    lines = [] if launch is None else _launch_lines(flags, launch)
    if refusal:
        return [*lines, "would start: nothing", str(refusal)]
    assert launch is not None
    if launch.externally_created:
        work = "the work of this rank, after the rendezvous of all ranks"
    elif count := processes_to_start(flags.requested_world, launch):
        work = f"{count} processes on this machine"
    else:
        work = "one process, or one per GPU of this machine"
    return [*lines, f"would start: {work}"]


def _launch_lines(flags: Arguments, launch: Launch) -> list[str]:
    rows = [
        ("launcher", f"{launch.launcher} ({launch.evidence})"),
        ("world", launch.shape + (f"; elastic, {launch.elastic}" if launch.elastic else "")),
    ]
    if launch.externally_created or (launch.num_nodes or 1) > 1:
        rank = "assigned at the rendezvous" if launch.rank is None else str(launch.rank)
        node = "" if launch.node_rank is None else f", node {launch.node_rank}"
        rows.append(("this is", f"rank {rank}{node}"))
        rows.append(("rendezvous", f"{launch.address}:{launch.port}"))
    if launch.hosts:
        rows.append(("hosts", ", ".join(launch.hosts)))
    rows.append(("backend", flags.get("backend") or "nccl if each process has its own GPU, else gloo"))
    rows.append(("threads", _threads(flags, launch)))
    rows += [("read", f"{name}={value}") for name, value in sorted(launch.variables.items())]
    return [f"{label + ':':<12} {text}" for label, text in rows]


def _threads(flags: Arguments, launch: Launch) -> str:
    """Returns the threads of each process, as far as they are known without a rendezvous."""
    ranks = launch.local_world_size if launch.externally_created else (flags.requested_world.devices or 1)
    size = max(launch.world_size, ranks or 1)
    threads = choose_threads(World(launch._replace(local_world_size=ranks, world_size=size)))
    if threads.count is None:
        return f"as set by {threads.reason}"
    if ranks is None:
        return f"{threads.reason} / the ranks of this machine"
    return f"{threads.count}{' each' * (size > 1)} ({threads.reason})"
