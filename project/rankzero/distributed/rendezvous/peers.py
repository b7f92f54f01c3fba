"""The processes of a run, as they describe themselves to one another. Does not import torch."""

import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.process.cores import cpu_quota, format_cpus, usable_cores
from rankzero.distributed.process.process_state import process_namespace


class Peer(NamedTuple):
    """One process, as it describes itself to the other processes.

    Args:
        rank: Its rank; None if the launcher does not provide one.
        local_rank: Its rank on its machine; None if the launcher does not provide one.
        node_rank: The rank of its machine; None if the launcher does not provide one.
        world_size: The number of processes that it expects.
        host: The name of its machine.
        pid: Its process id.
        rank_order: Sort key by which ranks are assigned if the launcher does not provide them.
        boot: The id of the kernel's boot, which distinguishes two machines of the same name.
        pids: The namespace of its process id, which differs between containers.
        cores: The cores that it may run on, in Linux's notation.
        quota: The CPU time that its cgroup allows, in CPUs; None without a limit.
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
        """Returns the description of this process."""
        host, pid = socket.gethostname(), os.getpid()
        ranks = (launch.rank, launch.local_rank, launch.node_rank)
        quota = cpu_quota()
        quota_and_cgroup = (quota.cpus, quota.cgroup) if quota else (None, "")
        cores = format_cpus(usable_cores())
        return cls(
            *ranks,
            launch.world_size,
            host,
            pid,
            launch.rank_order,
            _boot(),
            process_namespace(),
            cores,
            *quota_and_cgroup,
        )

    @classmethod
    def from_message(cls, values: Mapping[str, Any]) -> "Peer | None":
        """Returns the process in a message; None if the message is malformed."""
        if set(values) != set(cls._fields):
            return None
        peer = cls(**values)
        ranks = [rank for rank in (peer.rank, peer.local_rank, peer.node_rank) if rank is not None]
        counts = [*ranks, peer.world_size, peer.pid, peer.rank_order]
        if not all(type(count) is int and 0 <= count < 1 << 63 for count in counts):
            return None
        texts = (peer.host, peer.boot, peer.pids, peer.cgroup)
        is_valid = (
            all(isinstance(text, str) and text.isprintable() and len(text) < 2048 for text in texts)
            and all(rank < peer.world_size for rank in ranks)
            and isinstance(peer.cores, str)
            and re.fullmatch(r"[0-9,-]{0,2048}", peer.cores) is not None
            and (peer.quota is None or (type(peer.quota) in (int, float) and 0 <= peer.quota < 1e9))
        )
        return peer if is_valid else None

    @property
    def machine(self) -> tuple[str, str]:
        """Key that is the same for all processes of one machine."""
        return self.host, self.boot


def assign_ranks(launch: Launch, this_peer: Peer, members: Sequence[Peer]) -> tuple[Launch, list[Peer]]:
    """Assigns the ranks that the launcher did not provide; returns the completed launch, and all members by rank.

    Args:
        launch: The position of this process among all processes.
        this_peer: This process, which is one of `members`.
        members: All processes, in any order.
    """
    if this_peer.rank is None:
        ordered = sorted(members, key=lambda member: (member.node_rank or 0, member.rank_order, member.pid))
    else:
        ordered = sorted(members, key=lambda member: member.rank or 0)
    has_node_ranks = all(member.node_rank is not None for member in ordered)
    node_keys = [member.node_rank if has_node_ranks else member.machine for member in ordered]
    nodes = list(dict.fromkeys(sorted(node_keys) if has_node_ranks else node_keys))  # type: ignore[type-var]
    counts = [0] * len(nodes)
    assigned = []
    for rank, (member, node_key) in enumerate(zip(ordered, node_keys, strict=True)):
        node = nodes.index(node_key)
        local_rank = counts[node] if member.local_rank is None else member.local_rank
        assigned.append(member._replace(rank=rank, local_rank=local_rank, node_rank=node))
        counts[node] += 1
    this_member = next(member for original, member in zip(ordered, assigned, strict=True) if original == this_peer)
    assert this_member.node_rank is not None
    launch = launch._replace(
        rank=this_member.rank,
        local_rank=this_member.local_rank,
        node_rank=this_member.node_rank,
        num_nodes=len(nodes),
        local_world_size=counts[this_member.node_rank],
        processes_per_node=tuple(counts),
        hosts=tuple(next(member.host for member in assigned if member.node_rank == node) for node in range(len(nodes))),
    )
    return launch, assigned


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
