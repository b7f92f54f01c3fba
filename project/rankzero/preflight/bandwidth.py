"""Checks collectives on known values, and measures the bandwidth of all-reduce.

Definitions as in nccl-tests (doc/PERFORMANCE.md): the algorithm bandwidth is the size of the buffer divided by the
time; the bus bandwidth is that multiplied by 2 (n - 1) / n for n ranks.
"""

import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rankzero.distributed.coordination.coordinator import Coordinator
from rankzero.distributed.devices import synchronize
from rankzero.distributed.process.limits.memory import available_memory
from rankzero.distributed.timers import TIMERS
from rankzero.preflight.check import FAIL, NETWORK_ADVICE, OK, WARN, Check, error_lines, gather

SIZES = tuple(4**power for power in range(5, 15))
"""Sizes of the buffers in bytes, from 1 KiB to 256 MiB."""

MEMORY_SHARE = 0.05
"""Largest share of a machine's available memory that the buffers of its ranks take together."""

SECONDS_PER_SIZE = 0.3
MAX_REPEATS = 50

MAX_SECONDS = 2.0
"""Once an all-reduce takes longer than this, larger sizes are not measured."""


def check_collectives(
    coordinator: Coordinator,
    device: torch.device,
    warn_gbps: float,
    fail_gbps: float,
    gradient_bytes: int | None,
    model: str,
) -> Check:
    """Checks all-reduce, all-gather and broadcast, and measures all-reduce. All ranks must call.

    Args:
        coordinator: Exchanges results between all ranks, whose default process group must exist.
        device: Device of this process's buffers.
        warn_gbps: Bus bandwidth in Gbit/s below which the check warns.
        fail_gbps: Bus bandwidth in Gbit/s below which the check fails; on a single host, it warns.
        gradient_bytes: Bytes of the gradients of the model; None if unknown.
        model: Name of the model.
    """
    launch, hosts = coordinator.launch, coordinator.hosts
    size, local_ranks = launch.world_size, launch.local_world_size or 1
    _, errors = gather(coordinator, lambda: _check_values(launch.rank or 0, size, device), TIMERS.network_check)
    measured: list[Any] = []
    if not errors:
        measured, errors = gather(
            coordinator, lambda: _measure_all_reduce(size, local_ranks, device), TIMERS.network_check
        )
    if errors:
        details = error_lines(errors, hosts)
        values: dict[str, Any] = {"errors": errors}
        return Check("collectives", FAIL, "a collective failed", details, [NETWORK_ADVICE], values, blocks=True)
    rows: list[dict[str, float]] = measured[0]
    advice: list[str] = []
    peak = max(row["bus_gbps"] for row in rows)
    uses_network = (launch.num_nodes or 1) > 1
    status = FAIL if uses_network and peak < fail_gbps else WARN if peak < max(warn_gbps, fail_gbps) else OK
    lines = [f"{'size':>9} {'time':>11} {'algorithm':>15} {'bus bandwidth':>15}"]
    lines += [
        f"{_size_text(int(row['bytes'])):>9} {1e3 * row['seconds']:>8.3f} ms {row['algorithm_gbps']:>8.2f} Gbit/s "
        f"{row['bus_gbps']:>8.2f} Gbit/s"
        for row in rows
    ]
    summary = f"correct on all ranks; all-reduce reaches {peak:.2f} Gbit/s (bus bandwidth)"
    if gradient_bytes:
        seconds = step_seconds(gradient_bytes, rows)
        lines.append(
            f"{model} sends {gradient_bytes / 1e6:,.1f} MB per step: {1e3 * seconds:,.1f} ms at this bandwidth, "
            "partly during the backward pass"
        )
    if status != OK:
        advice = [
            f"all-reduce is slower than {fail_gbps if status == FAIL else warn_gbps:g} Gbit/s: --interface NAME "
            "selects a faster network; --trainer.accumulate_grad_batches N communicates less often, and a compression "
            "hook of DistributedDataParallel sends less"
        ]
    values = {"all_reduce": rows, "gradient_bytes": gradient_bytes}
    return Check("collectives", status, summary, lines, advice, values)


def step_seconds(gradient_bytes: int, rows: list[dict[str, float]]) -> float:
    """Returns the seconds that an all-reduce of the gradients takes, interpolated between the measured sizes.

    Args:
        gradient_bytes: Bytes of all gradients.
        rows: The measured sizes with their seconds, smallest size first.
    """
    largest = rows[-1]
    if gradient_bytes > largest["bytes"]:
        return largest["seconds"] * gradient_bytes / largest["bytes"]
    return float(np.interp(gradient_bytes, [row["bytes"] for row in rows], [row["seconds"] for row in rows]))


def _check_values(rank: int, size: int, device: torch.device) -> bool:
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
    wrong = [name for name, is_correct in expected.items() if not is_correct]
    if wrong:
        raise ValueError(f"wrong result of {', '.join(wrong)}")
    return True


def _measure_all_reduce(size: int, local_ranks: int, device: torch.device) -> list[dict[str, float]]:
    available = MEMORY_SHARE * available_memory() / local_ranks
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
        rows.append(
            {
                "bytes": count_bytes,
                "seconds": seconds,
                "algorithm_gbps": algorithm,
                "bus_gbps": algorithm * 2 * (size - 1) / size,
            }
        )
        if seconds > MAX_SECONDS / 4:  # the next size takes about four times as long
            break
    return rows


def _time_all_reduce(buffer: torch.Tensor, repeats: int) -> float:
    """Returns the seconds of one all-reduce, averaged over `repeats`."""
    dist.all_reduce(buffer[:1])
    synchronize(buffer.device)
    started = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(buffer)
    synchronize(buffer.device)
    return (time.perf_counter() - started) / repeats


def _largest_over_ranks(number: float, device: torch.device) -> float:
    value = torch.tensor([number], dtype=torch.float64, device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def _size_text(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"
