"""Measures the bandwidth between pairs of hosts, or between ranks on one host, and finds slow links and hosts."""

import time
from collections.abc import Mapping, Sequence
from statistics import median

import torch
import torch.distributed as dist

from rankzero.distributed.coordination.coordinator import Coordinator
from rankzero.distributed.devices import synchronize
from rankzero.distributed.timers import TIMERS
from rankzero.preflight.check import (
    FAIL,
    NETWORK_ADVICE,
    OK,
    SKIPPED,
    WARN,
    Check,
    error_lines,
    gather,
)

MESSAGE_BYTES = 4 << 20
SECONDS_PER_PAIR = 0.3

SECONDS_PER_ROUND = 2.0
"""How much longer a rank without pairs waits for each round of the other ranks."""

SLOW_LINK_FACTOR = 0.5
"""A link is slow if its bandwidth is below this multiple of the median of all links."""

Pair = tuple[int, int]


def check_links(coordinator: Coordinator, device: torch.device, mode: str, warn_gbps: float, fail_gbps: float) -> Check:
    """Measures pairs of hosts, each by its first rank; on a single host, pairs of ranks. All ranks must call.

    Args:
        coordinator: Exchanges results between all ranks, whose default process group must exist.
        device: Device of this process's messages.
        mode: `quick` measures each host with the next one, `all` all pairs of hosts, `off` nothing.
        warn_gbps: Bandwidth in Gbit/s below which a link is reported.
        fail_gbps: Bandwidth in Gbit/s below which the check fails; on a single host, it warns.
    """
    size, rank = coordinator.launch.world_size, coordinator.launch.rank or 0
    if mode == "off":
        return Check("links", SKIPPED, "--pairs off")
    hosts = coordinator.hosts
    first_ranks = list({member.node_rank: member.rank or 0 for member in reversed(list(coordinator.members))}.values())
    ends = sorted(first_ranks) if len(first_ranks) > 1 else list(range(size))
    rounds = all_rounds(ends) if mode == "all" else ring_rounds(ends)

    def measure() -> list[list[float]]:
        own = []
        for pairs in rounds:
            for pair in pairs:
                if rank in pair:
                    own.append([*pair, _exchange(pair, rank, device)])
        return own

    measured, errors = gather(coordinator, measure, TIMERS.network_check + SECONDS_PER_ROUND * len(rounds))
    if errors:
        details, text = error_lines(errors, hosts), "a pair of ranks could not communicate"
        return Check("links", FAIL, text, details, [NETWORK_ADVICE], {"errors": errors}, blocks=True)
    gbps = {(int(a), int(b)): value for rows in measured for a, b, value in rows or []}
    uses_network = len(first_ranks) > 1
    slow = slow_links(gbps, max(warn_gbps, fail_gbps))
    names = {pair: f"{hosts[pair[0]]} - {hosts[pair[1]]} (ranks {pair[0]} and {pair[1]})" for pair in gbps}
    details = [f"{names[pair]}: {gbps[pair]:.2f} Gbit/s" for pair in slow]
    slow_hosts = _slow_hosts(slow, gbps, hosts)
    status = FAIL if uses_network and any(gbps[pair] < fail_gbps for pair in slow) else WARN if slow else OK
    middle = median(gbps.values())
    summary = f"{len(gbps)} pair{'s' * (len(gbps) > 1)}, median {middle:.2f} Gbit/s, slowest {min(gbps.values()):.2f}"
    advice = [f"check the network of {host}, whose links are all slow" for host in slow_hosts]
    advice += [NETWORK_ADVICE] * bool(slow and not slow_hosts)
    values = {"pairs": [{"ranks": list(pair), "gbps": value} for pair, value in gbps.items()], "mode": mode}
    return Check("links", status, summary, details, advice, values)


def ring_rounds(ends: Sequence[int]) -> list[list[Pair]]:
    """Returns the pairs of neighbors in a ring, in rounds in which each rank occurs once."""
    if len(ends) == 2:
        return [[(ends[0], ends[1])]]
    pairs = [(ends[index], ends[(index + 1) % len(ends)]) for index in range(len(ends))]
    last = [pairs.pop()] if len(ends) % 2 else []
    return [group for group in (pairs[::2], pairs[1::2], last) if group]


def all_rounds(ends: Sequence[int]) -> list[list[Pair]]:
    """Returns all pairs, in rounds in which each rank occurs at most once (the circle method for tournaments)."""
    players: list[int | None] = [*ends, *([None] if len(ends) % 2 else [])]
    rounds = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        opposite = zip(players[:half], reversed(players[half:]), strict=True)
        rounds.append([(a, b) for a, b in opposite if a is not None and b is not None])
        players = [players[0], players[-1], *players[1:-1]]
    return rounds


def slow_links(gbps: Mapping[Pair, float], warn_gbps: float) -> list[Pair]:
    """Returns the links below `warn_gbps`, or far below the median of all links, slowest first."""
    middle = median(gbps.values())
    slow = [pair for pair, value in gbps.items() if value < warn_gbps or value < SLOW_LINK_FACTOR * middle]
    return sorted(slow, key=lambda pair: gbps[pair])


def _slow_hosts(slow: Sequence[Pair], gbps: Mapping[Pair, float], hosts: Sequence[str]) -> list[str]:
    """Returns the hosts all of whose links are slow, if they have several links, and other hosts have fast ones."""
    fast_hosts = {hosts[rank] for pair in gbps if pair not in slow for rank in pair}
    counts: dict[str, int] = {}
    for pair in slow:
        for rank in pair:
            counts[hosts[rank]] = counts.get(hosts[rank], 0) + 1
    return [host for host, count in counts.items() if count > 1 and host not in fast_hosts and fast_hosts]


def _exchange(pair: Pair, rank: int, device: torch.device) -> float:
    """Sends messages back and forth between two ranks; returns Gbit/s in one direction."""
    buffer = torch.zeros(MESSAGE_BYTES // 4, device=device)

    def round_trip() -> None:
        if rank == pair[0]:
            dist.send(buffer, pair[1])
            dist.recv(buffer, pair[1])
        else:
            dist.recv(buffer, pair[0])
            dist.send(buffer, pair[0])

    started = time.perf_counter()
    round_trip()
    synchronize(device)
    first = torch.tensor([time.perf_counter() - started], device=device)
    if rank == pair[0]:
        dist.send(first, pair[1])
    else:
        dist.recv(first, pair[0])
    repeats = max(1, min(20, int(SECONDS_PER_PAIR / max(float(first), 1e-6))))
    started = time.perf_counter()
    for _ in range(repeats):
        round_trip()
    synchronize(device)
    return 8e-9 * MESSAGE_BYTES * 2 * repeats / (time.perf_counter() - started)
