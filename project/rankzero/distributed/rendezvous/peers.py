"""The processes of a run, as they tell one another who they are. Imports no torch."""

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.process.cores import cpu_quota, format_cpus, usable_cores
from rankzero.distributed.process.process_state import process_namespace


class Peer(NamedTuple):
    """One process, as it tells the others.

    Args:
        rank: Its rank; None where the launcher gives none.
        local_rank: Its rank on its machine; None where the launcher does not say.
        node_rank: Its machine's; None where the launcher does not say.
        world_size: How many processes it believes there are.
        host: Its machine's name.
        pid: Its process id.
        rank_order: What ranks are handed out by, where the launcher gives none.
        boot: What tells two machines of one name apart: the id of the kernel's start.
        pids: Among which processes its id counts: those of its container, say.
        cores: The cores that it may run on, in Linux's notation.
        quota: The CPUs' worth of time that its cgroup allows; None without a limit.
        cgroup: The cgroup that has this limit.
    """

    rank: int | None
    local_rank: int | None
    node_rank: int | None
    world_size: int
    host: str
    pid: int
    rank_order: int = 0
    boot: str = ""
    pids: str = ""
    cores: str = ""
    quota: float | None = None
    cgroup: str = ""

    @classmethod
    def this(cls, launch: Launch) -> "Peer":
        """This process."""
        host, pid = socket.gethostname(), os.getpid()
        place = (launch.rank, launch.local_rank, launch.node_rank)
        quota = cpu_quota()
        limit = (quota.cpus, quota.cgroup) if quota else (None, "")
        cores = format_cpus(usable_cores())
        return cls(*place, launch.world_size, host, pid, launch.rank_order, _boot(), process_namespace(), cores, *limit)

    @property
    def machine(self) -> tuple[str, str]:
        """What two processes of one machine share."""
        return self.host, self.boot


def assign_ranks(launch: Launch, me: Peer, members: Sequence[Peer]) -> tuple[Launch, list[Peer]]:
    """The launch with what the launcher did not say, and all members with it, by rank."""
    if me.rank is None:
        ordered = sorted(members, key=lambda member: (member.node_rank or 0, member.rank_order, member.pid))
    else:
        ordered = sorted(members, key=lambda member: member.rank or 0)
    is_known = all(member.node_rank is not None for member in ordered)
    names = [member.node_rank if is_known else member.machine for member in ordered]
    nodes = list(dict.fromkeys(sorted(names) if is_known else names))  # type: ignore[type-var]
    count = [0] * len(nodes)
    placed = []
    for rank, (member, name) in enumerate(zip(ordered, names, strict=True)):
        node = nodes.index(name)
        local_rank = count[node] if member.local_rank is None else member.local_rank
        placed.append(member._replace(rank=rank, local_rank=local_rank, node_rank=node))
        count[node] += 1
    own = next(member for old, member in zip(ordered, placed, strict=True) if old == me)
    assert own.node_rank is not None
    launch = launch._replace(
        rank=own.rank,
        local_rank=own.local_rank,
        node_rank=own.node_rank,
        num_nodes=len(nodes),
        local_world_size=count[own.node_rank],
        processes_a_node=tuple(count),
        hosts=tuple(next(member.host for member in placed if member.node_rank == node) for node in range(len(nodes))),
    )
    return launch, placed


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
