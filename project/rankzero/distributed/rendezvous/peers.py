"""The processes of a run, as they describe themselves to one another. Does not import torch."""

import os
import re
import secrets
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from rankzero.distributed.connections.key import Key
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
        boot: The id of the kernel's boot, which distinguishes two machines of the same name.
        pids: The namespace of its process id, which differs between containers.
        cores: The cores that it may run on, in Linux's notation.
        quota: The CPU time that its cgroup allows, in CPUs; None without a limit.
        cgroup: The cgroup that has this limit.
        id: Random text that identifies the process during the rendezvous.
        key_fingerprint: Text by which rank zero compares the key of the process with its own, see `Key.fingerprint`;
            empty if it has none.
    """

    rank: int | None
    local_rank: int | None
    node_rank: int | None
    world_size: int
    host: str
    pid: int
    boot: str = ""
    pids: str = ""
    cores: str = ""
    quota: float | None = None
    cgroup: str = ""
    id: str = ""
    key_fingerprint: str = ""

    @classmethod
    def this(cls, launch: Launch, key: Key | None = None) -> "Peer":
        """Returns the description of this process; with `key`, including the key's fingerprint."""
        quota = cpu_quota()
        return cls(
            rank=launch.rank,
            local_rank=launch.local_rank,
            node_rank=launch.node_rank,
            world_size=launch.world_size,
            host=socket.gethostname(),
            pid=os.getpid(),
            boot=_boot(),
            pids=process_namespace(),
            cores=format_cpus(usable_cores()),
            quota=quota.cpus if quota else None,
            cgroup=quota.cgroup if quota else "",
            id=secrets.token_hex(8),
            key_fingerprint=key.fingerprint(launch.world_id) if key else "",
        )

    @classmethod
    def from_message(cls, values: Any) -> "Peer | None":
        """Returns the process in a message; None if the message is malformed."""
        if not isinstance(values, dict) or set(values) != set(cls._fields):
            return None
        peer = cls(**values)
        ranks = [rank for rank in (peer.rank, peer.local_rank, peer.node_rank) if rank is not None]
        counts = [*ranks, peer.world_size, peer.pid]
        if not all(type(count) is int and 0 <= count < 1 << 63 for count in counts):
            return None
        texts = (peer.host, peer.boot, peer.pids, peer.cgroup, peer.id, peer.key_fingerprint)
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

    def has_key_of(self, other: "Peer") -> bool:
        """Returns whether both processes have the same key, or none."""
        return self.key_fingerprint == other.key_fingerprint


class Members:
    """The processes of a run that this process knows: on rank zero all, elsewhere rank zero and its machine's."""

    def __init__(self, peers: Iterable[Peer]) -> None:
        self._by_rank = {peer.rank: peer for peer in peers}

    def __getitem__(self, rank: int) -> Peer:
        return self._by_rank[rank]

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._by_rank.values())

    def __len__(self) -> int:
        return len(self._by_rank)

    def name_of(self, rank: int) -> str:
        """Returns the name of a rank for messages, such as `rank 3 on n2`; without host if that is unknown."""
        return f"rank {rank} on {self[rank].host}" if rank in self._by_rank else f"rank {rank}"


def assign_ranks(members: Sequence[Peer]) -> list[Peer]:
    """Assigns the positions that the launcher did not provide; returns all processes by rank, without their keys.

    Args:
        members: All processes. If the launcher provides no ranks, the first one becomes rank zero: the process that
            listens, which may be any of the first node. The other processes may be in any order.
    """
    if any(member.rank is None for member in members):
        others = sorted(members[1:], key=lambda member: (member.node_rank or 0, member.pid))
        ordered = [members[0], *others]
    else:
        ordered = sorted(members, key=lambda member: member.rank or 0)
    has_node_ranks = all(member.node_rank is not None for member in ordered)
    node_keys = [member.node_rank if has_node_ranks else member.machine for member in ordered]
    distinct_keys = dict.fromkeys(sorted(node_keys) if has_node_ranks else node_keys)  # type: ignore[type-var]
    nodes = {key: node for node, key in enumerate(distinct_keys)}
    counts = [0] * len(nodes)
    assigned = []
    for rank, (member, node_key) in enumerate(zip(ordered, node_keys, strict=True)):
        node = nodes[node_key]
        local_rank = counts[node] if member.local_rank is None else member.local_rank
        assigned.append(member._replace(rank=rank, local_rank=local_rank, node_rank=node, key_fingerprint=""))
        counts[node] += 1
    return assigned


def node_views(assigned: Sequence[Peer]) -> list[dict[str, Any]]:
    """Returns what the processes of each node need to know of the run, as JSON-serializable messages by node."""
    by_node: dict[int | None, list[Peer]] = {}
    by_machine: dict[tuple[str, str], list[Peer]] = {}
    for peer in assigned:
        by_node.setdefault(peer.node_rank, []).append(peer)
        by_machine.setdefault(peer.machine, []).append(peer)  # several nodes may run on one machine, for a trial
    sizes = [len(by_node[node]) for node in range(len(by_node))]
    counts = [[count, len(list(group))] for count, group in groupby(sizes)]
    views = []
    for node in range(len(by_node)):
        known = {peer.rank: peer for peer in by_node[node]}
        for machine in {peer.machine for peer in by_node[node]}:
            known |= {peer.rank: peer for peer in by_machine[machine]}
        peers = [known[rank]._asdict() for rank in sorted(known, key=lambda rank: rank or 0)]
        views.append({"first": assigned[0]._asdict(), "peers": peers, "counts": counts})
    return views


def read_view(launch: Launch, this_peer: Peer, view: Mapping[str, Any]) -> tuple[Launch, Members] | None:
    """Returns the completed launch and the known processes from the view of this process's node; None if malformed."""
    try:
        peers = [Peer.from_message(values) for values in (view["first"], *view["peers"])]
        counts = [int(count) for count, nodes in view["counts"] for _ in range(min(int(nodes), launch.world_size))]
    except (KeyError, TypeError, ValueError):
        return None
    first, *local = filter(None, peers)
    own = next((peer for peer in local if peer.id == this_peer.id), None)
    if len(local) != len(peers) - 1 or own is None or own.node_rank is None or own.node_rank >= len(counts):
        return None
    return completed(launch, own, counts), Members([first, *local])


def completed(launch: Launch, own: Peer, counts: Sequence[int]) -> Launch:
    """Returns the launch with complete positions."""
    assert own.node_rank is not None
    return launch._replace(
        rank=own.rank,
        local_rank=own.local_rank,
        node_rank=own.node_rank,
        num_nodes=len(counts),
        local_world_size=counts[own.node_rank],
        processes_per_node=tuple(counts),
    )


def completed_by_rank_zero(launch: Launch, this_peer: Peer, assigned: Sequence[Peer]) -> tuple[Launch, Members]:
    """Returns rank zero's completed launch, which includes the hosts, and all processes."""
    own = next(peer for peer in assigned if peer.id == this_peer.id)
    counts = Counter(peer.node_rank for peer in assigned)
    hosts = {peer.node_rank: peer.host for peer in reversed(assigned)}
    launch = completed(launch, own, [counts[node] for node in range(len(counts))])
    return launch._replace(hosts=tuple(hosts[node] for node in range(len(counts)))), Members(assigned)


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@dataclass
class RendezvousResult:
    """All processes of a run, or only this process if no rendezvous was needed.

    Args:
        launch: The position of this process among all processes; complete after a rendezvous.
        members: The processes that this process knows; only itself without a rendezvous.
        ip: The address at which rank zero answered.
        listener: The socket on which rank zero accepted the other processes; None on all other ranks.
        key_problem: Why the processes do not share a key; empty if they do.
    """

    launch: Launch
    members: Members
    ip: str
    listener: socket.socket | None = None
    key_problem: str = ""

    @classmethod
    def without_rendezvous(cls, launch: Launch) -> "RendezvousResult":
        """Returns the result for a process that is alone, or that torchrun has already connected to the other ranks."""
        return cls(launch, Members([Peer.this(launch)]), launch.address)
