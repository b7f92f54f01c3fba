"""`--explain`: prints the detected launcher and what would start, without a rendezvous. Does not import torch."""

from rankzero.cli.arguments import Arguments
from rankzero.distributed.coordination.network import address_of
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.environments.validate import check_world, processes_to_start
from rankzero.distributed.process.threads import choose_threads
from rankzero.distributed.stop_and_failure.error_reporter import is_reporting_rank
from rankzero.distributed.world import World
from rankzero.messages import Exit, print_line


def explain(flags: Arguments, launch: Launch) -> int:
    """Prints the explanation on the reporting rank and returns the exit code.

    Raises:
        RequestError: Flags and variables alone rule out the start.
    """
    work, requested = "nothing", flags.requested_world
    try:
        check_world(requested, launch)
        count = processes_to_start(requested, launch)
        if requested.interface:
            address_of(requested.interface)
        work = "one process, or one per GPU of this machine"
        if launch.externally_created:
            work = "the work of this rank, after the rendezvous of all ranks"
        elif count:
            work = f"{count} processes on this machine"
            launch = launch._replace(world_size=count * (launch.num_nodes or 1), local_world_size=count)
    finally:
        if is_reporting_rank(launch):
            print_line("\n".join([*_launch_lines(flags, launch), f"would start: {work}"]))
    return Exit.FINISHED


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
    rows.append(("threads", _threads(launch)))
    rows += [("read", f"{name}={value}") for name, value in sorted(launch.variables.items())]
    return [f"{label + ':':<12} {text}" for label, text in rows]


def _threads(launch: Launch) -> str:
    """Returns the threads of each process, as far as they are known without a rendezvous."""
    threads = choose_threads(World(launch))
    if threads.count is None:
        return f"as set by {threads.reason}"
    if launch.local_world_size is None:
        return f"{threads.reason} / the ranks of this machine"
    return f"{threads.count}{' each' * (launch.world_size > 1)} ({threads.reason})"
