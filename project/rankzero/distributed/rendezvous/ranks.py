"""The positions of the processes of a run, which rank zero assigns."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.world import Peer, World


def assign_ranks(members: Sequence[Peer]) -> list[Peer]:
    """Assigns the positions that the launcher did not provide; returns all processes by rank, without their keys.

    Args:
        members: All processes. If the launcher provides no ranks, the first one becomes rank zero: the process that
            listens, which may be any of the first node. The other processes may be in any order.
    """
    if any(member.rank is None for member in members):
        ordered = [members[0], *sorted(members[1:], key=lambda member: (member.node_rank or 0, member.pid))]
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


def read_view(launch: Launch, this_peer: Peer, view: Mapping[str, Any]) -> World | None:
    """Returns the known part of the world from the view of a node; None if it is not that of this process's node."""
    counts = [count for count, nodes in view["counts"] for _ in range(min(nodes, launch.world_size))]
    own = next((peer for peer in view["peers"] if peer.id == this_peer.id), None)
    if own is None or own.node_rank is None or own.node_rank >= len(counts):
        return None
    return _world(launch, own, counts, [view["first"], *view["peers"]])


def world_of_rank_zero(launch: Launch, this_peer: Peer, assigned: Sequence[Peer]) -> World:
    """Returns rank zero's world, which includes all processes and hosts."""
    own = next(peer for peer in assigned if peer.id == this_peer.id)
    counts = Counter(peer.node_rank for peer in assigned)
    hosts = {peer.node_rank: peer.host for peer in reversed(assigned)}
    launch = launch._replace(hosts=tuple(hosts[node] for node in range(len(counts))))
    return _world(launch, own, [counts[node] for node in range(len(counts))], assigned)


def _world(launch: Launch, own: Peer, counts: Sequence[int], peers: Sequence[Peer]) -> World:
    """Returns the world with the position of this process, given the number of processes on each node."""
    assert own.node_rank is not None
    launch = launch._replace(
        rank=own.rank,
        local_rank=own.local_rank,
        node_rank=own.node_rank,
        num_nodes=len(counts),
        local_world_size=counts[own.node_rank],
        processes_per_node=tuple(counts),
    )
    return World(launch, {peer.rank or 0: peer for peer in peers})
