"""Checks messages, collectives and links between ranks, and measures their bandwidth.

Definitions of the bandwidth of all-reduce as in nccl-tests (doc/PERFORMANCE.md): the algorithm bandwidth is the size of
the buffer divided by the time; the bus bandwidth is that multiplied by 2 (n - 1) / n for n ranks.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rankzero.distributed.coordination.coordinator import Coordinator
from rankzero.distributed.devices import synchronize
from rankzero.distributed.process.system import available_memory
from rankzero.distributed.timers import TIMERS
from rankzero.distributed.world import World
from rankzero.preflight.check import FAIL, NETWORK_ADVICE, OK, SKIPPED, WARN, Check, failure
from rankzero.preflight.gpus import Link, gather_in_time

VALUES = 1024
"""Number of values in a message."""

CHANGED = "the received data differs from the sent data"


def check_message_passing(
    coordinator: Coordinator, backend: str, group: Any, device: torch.device, notify: Callable[[str], None]
) -> Check:
    """Sends data from rank zero to each other rank, one by one, then from each rank to the next. All ranks must call.

    The group has all ranks and this backend, `nccl` or `gloo`. Rank zero calls `notify` with a line for each receipt.
    """
    name, size, rank = f"{backend} messages", coordinator.world.size, coordinator.world.rank
    hosts = coordinator.world.hosts

    def send_to_each() -> list[float]:
        seconds, is_intact = [], True
        for receiver in range(1, size):
            if rank == 0:
                started = time.perf_counter()
                dist.send(_message(receiver, device), receiver, group=group)
                answer = torch.zeros(VALUES, device=device)
                dist.recv(answer, receiver, group=group)
                is_intact &= torch.equal(answer, _message(receiver + size, device))
                seconds.append(time.perf_counter() - started)
                notify(f"rank {receiver} on {hosts[receiver]} received data from rank 0")
            elif rank == receiver:
                received = torch.zeros(VALUES, device=device)
                dist.recv(received, 0, group=group)
                is_intact = torch.equal(received, _message(receiver, device))
                dist.send(_message(receiver + size, device), 0, group=group)
        if not is_intact:  # raised last, because the other ranks wait for this one
            raise ValueError(CHANGED)
        return seconds

    def send_around() -> None:
        received = torch.zeros(VALUES, device=device)
        previous = (rank - 1) % size
        to_next = dist.P2POp(dist.isend, _message(rank, device), (rank + 1) % size, group)
        for work in dist.batch_isend_irecv([to_next, dist.P2POp(dist.irecv, received, previous, group)]):
            work.wait()
        if not torch.equal(received, _message(previous, device)):
            raise ValueError(CHANGED)

    seconds, errors = gather_in_time(coordinator, send_to_each, device, TIMERS.network_check)
    if not errors:
        _, errors = gather_in_time(coordinator, send_around, device, TIMERS.network_check)
    round_trips = [round(value, 6) for value in seconds[0] or []]
    if errors:
        summary = "a message did not arrive, or its data changed"
        return failure(name, summary, errors, hosts, NETWORK_ADVICE, round_trips=round_trips)
    slowest = max(range(1, size), key=lambda rank: round_trips[rank - 1])
    duration = f"with rank {slowest} on {hosts[slowest]}, took {1e3 * round_trips[slowest - 1]:.1f} ms"
    summary = "rank 0 exchanged data with each other rank, and each rank with the next; the longest round trip, "
    return Check(name, OK, summary + duration, values={"round_trips": round_trips})


def _message(number: int, device: torch.device) -> torch.Tensor:
    return torch.arange(VALUES, dtype=torch.float32, device=device) + number


SIZES = tuple(4**power for power in range(5, 15))
"""Sizes of the buffers in bytes, from 1 KiB to 256 MiB."""

MEMORY_SHARE = 0.05
"""Largest share of a machine's available memory that the buffers of its ranks take together."""

SECONDS_PER_SIZE = 0.3
MAX_REPEATS = 50

MAX_SECONDS = 2.0
"""Once an all-reduce takes longer than this, larger sizes are not measured."""

FASTER_ADVICE = (
    "--interface NAME selects a faster network; --trainer.accumulate_grad_batches N communicates less often, and a "
    "compression hook of DistributedDataParallel sends less"
)


def check_collectives(
    coordinator: Coordinator,
    device: torch.device,
    warn_gbps: float,
    fail_gbps: float,
    gradient_bytes: int | None,
    model: str,
    link: Link | None = None,
) -> Check:
    """Checks all-reduce, all-gather and broadcast, and measures all-reduce. All ranks must call.

    The default process group must exist. Below a bus bandwidth of `warn_gbps` Gbit/s, the check warns; below
    `fail_gbps`, it fails, or warns on a single host. It also warns if all-reduce is much slower than the link that NCCL
    should use. `gradient_bytes` is None if unknown.
    """
    world, hosts = coordinator.world, coordinator.world.hosts
    seconds, measured = TIMERS.network_check, list[Any]()
    _, errors = gather_in_time(coordinator, lambda: _check_values(world.rank, world.size, device), device, seconds)
    if not errors:
        measured, errors = gather_in_time(coordinator, lambda: _measure_all_reduce(world, device), device, seconds)
    if errors:
        return failure("collectives", "a collective failed", errors, hosts, NETWORK_ADVICE)
    rows: list[dict[str, float]] = measured[0]
    peak = max(row["bus_gbps"] for row in rows)
    uses_network = world.nodes > 1
    status = FAIL if uses_network and peak < fail_gbps else WARN if peak < max(warn_gbps, fail_gbps) else OK
    lines = [f"{'size':>9} {'time':>11} {'algorithm':>15} {'bus bandwidth':>15}"]
    lines += [
        f"{_size_text(int(row['bytes'])):>9} {1e3 * row['seconds']:>8.3f} ms {row['algorithm_gbps']:>8.2f} Gbit/s "
        f"{row['bus_gbps']:>8.2f} Gbit/s"
        for row in rows
    ]
    summary = f"correct on all ranks; all-reduce reaches {peak:.2f} Gbit/s (bus bandwidth)"
    if gradient_bytes:
        milliseconds = f"{1e3 * step_seconds(gradient_bytes, rows):,.1f} ms at this bandwidth"
        sent = f"{model} sends {gradient_bytes / 1e6:,.1f} MB per step"
        lines.append(f"{sent}: {milliseconds}, partly during the backward pass")
    advice: list[str] = []
    if status != OK:
        limit = fail_gbps if status == FAIL else warn_gbps
        advice = [f"all-reduce is slower than {limit:g} Gbit/s: {FASTER_ADVICE}"]
    elif link and peak < link.least_gbps:
        status = WARN
        slow = f"all-reduce reaches {peak:,.0f} Gbit/s, but the hosts have {link.name}"
        advice = [f"{slow}: NCCL_DEBUG=INFO prints which connections NCCL uses, and why"]
    return Check("collectives", status, summary, lines, advice, {"all_reduce": rows, "gradient_bytes": gradient_bytes})


def step_seconds(gradient_bytes: int, rows: list[dict[str, float]]) -> float:
    """Returns the seconds that an all-reduce of the gradients takes, interpolated between the measured sizes."""
    largest = rows[-1]
    if gradient_bytes > largest["bytes"]:
        return largest["seconds"] * gradient_bytes / largest["bytes"]
    return float(np.interp(gradient_bytes, [row["bytes"] for row in rows], [row["seconds"] for row in rows]))


def _check_values(rank: int, size: int, device: torch.device) -> None:
    values = torch.full((1000,), float(rank + 1), device=device)
    dist.all_reduce(values)
    gathered = [torch.zeros(10, device=device) for _ in range(size)]
    dist.all_gather(gathered, torch.full((10,), float(rank), device=device))
    sent = torch.full((10,), 42.0 if rank == size - 1 else 0.0, device=device)
    dist.broadcast(sent, size - 1)
    expected = {
        "all_reduce": bool((values == size * (size + 1) / 2).all()),
        "all_gather": all(bool((part == index).all()) for index, part in enumerate(gathered)),
        "broadcast": bool((sent == 42).all()),
    }
    if wrong := [name for name, is_correct in expected.items() if not is_correct]:
        raise ValueError(f"wrong result of {', '.join(wrong)}")


def _measure_all_reduce(world: World, device: torch.device) -> list[dict[str, float]]:
    available = MEMORY_SHARE * available_memory() / world.devices
    limit = -_largest_over_ranks(-available, device)
    rows: list[dict[str, float]] = []
    for count_bytes in SIZES:
        if rows and count_bytes > limit:
            break
        buffer = torch.zeros(count_bytes // 4, device=device)
        first = _largest_over_ranks(_time_all_reduce(buffer, 1), device)
        repeats = max(1, min(MAX_REPEATS, int(SECONDS_PER_SIZE / max(first, 1e-6))))
        seconds = _largest_over_ranks(_time_all_reduce(buffer, repeats), device)
        algorithm = 8e-9 * count_bytes / seconds
        row = {"bytes": count_bytes, "seconds": seconds, "algorithm_gbps": algorithm}
        rows.append(row | {"bus_gbps": algorithm * 2 * (world.size - 1) / world.size})
        if seconds > MAX_SECONDS / 4:  # the next size takes about four times as long
            break
    return rows


def _time_all_reduce(buffer: torch.Tensor, repeats: int) -> float:
    """Returns the seconds of one all-reduce, averaged over `repeats`."""
    is_on_gpu = buffer.is_cuda  # NCCL queues the calls; only the last one has to be waited for
    _finish(dist.all_reduce(buffer[:1], async_op=is_on_gpu))
    started = time.perf_counter()
    for _ in range(repeats):
        work = dist.all_reduce(buffer, async_op=is_on_gpu)
    _finish(work)
    return (time.perf_counter() - started) / repeats


def _finish(work: dist.Work | None) -> None:
    """Waits for a collective of NCCL; those of gloo are None, and complete.

    While a process group raises the errors of NCCL, `wait` looks for them once a millisecond, too seldom for NVLink.
    """
    end = time.perf_counter() + MAX_SECONDS
    while work and not work.is_completed() and time.perf_counter() < end:
        pass
    if work:
        work.wait()


def _largest_over_ranks(number: float, device: torch.device) -> float:
    value = torch.tensor([number], dtype=torch.float64, device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def _size_text(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"


MESSAGE_BYTES, MESSAGE_BYTES_ON_GPU = 4 << 20, 64 << 20
SECONDS_PER_PAIR = 0.3

SECONDS_PER_ROUND = 2.0
"""How much longer a rank without pairs waits for each round of the other ranks."""

SLOW_LINK_FACTOR = 0.5
"""A link is slow if its bandwidth is below this multiple of the median of all links."""

Pair = tuple[int, int]


def check_links(coordinator: Coordinator, device: torch.device, mode: str, warn_gbps: float, fail_gbps: float) -> Check:
    """Measures pairs of hosts, each by its first rank; on a single host, pairs of ranks. All ranks must call.

    The default process group must exist. The mode `quick` measures each host with the next one, `all` all pairs of
    hosts, `off` nothing. A link below `warn_gbps` Gbit/s is reported; below `fail_gbps`, the check fails, or warns on a
    single host.
    """
    size, rank = coordinator.world.size, coordinator.world.rank
    if mode == "off":
        return Check("links", SKIPPED, "--pairs off")
    hosts = coordinator.world.hosts
    first_ranks = list({peer.node_rank: rank for rank, peer in reversed(coordinator.world.peers.items())}.values())
    ends = sorted(first_ranks) if len(first_ranks) > 1 else list(range(size))
    rounds = all_rounds(ends) if mode == "all" else ring_rounds(ends)

    def measure() -> list[list[float]]:
        return [[*pair, _exchange(pair, rank, device)] for pairs in rounds for pair in pairs if rank in pair]

    seconds = TIMERS.network_check + SECONDS_PER_ROUND * len(rounds)
    measured, errors = gather_in_time(coordinator, measure, device, seconds)
    if errors:
        return failure("links", "a pair of ranks could not communicate", errors, hosts, NETWORK_ADVICE)
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
    pairs = list(pairwise([*ends, ends[0]]))
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
    counts = Counter(hosts[rank] for pair in slow for rank in pair)
    return [host for host, count in counts.items() if count > 1 and host not in fast_hosts and fast_hosts]


def _exchange(pair: Pair, rank: int, device: torch.device) -> float:
    """Sends messages back and forth between two ranks; returns Gbit/s in one direction."""
    is_on_gpu = device.type == "cuda"
    count_bytes = MESSAGE_BYTES_ON_GPU if is_on_gpu else MESSAGE_BYTES
    buffer = torch.zeros(count_bytes // 4, device=device)
    steps = (dist.isend, dist.irecv) if is_on_gpu else (dist.send, dist.recv)
    peer = pair[1] if rank == pair[0] else pair[0]

    def round_trip() -> None:
        for step in steps if rank == pair[0] else steps[::-1]:
            work = step(buffer, peer)
            if isinstance(work, dist.Work):
                _finish(work)

    started = time.perf_counter()
    round_trip()
    synchronize(device)
    first = torch.tensor([time.perf_counter() - started], device=device)
    (dist.send if rank == pair[0] else dist.recv)(first, peer)
    repeats = max(1, min(20, int(SECONDS_PER_PAIR / max(float(first), 1e-6))))
    started = time.perf_counter()
    for _ in range(repeats):
        round_trip()
    synchronize(device)
    return 8e-9 * count_bytes * 2 * repeats / (time.perf_counter() - started)
