"""Checks which processes the launcher has started, its settings that cost speed, and how long torch took to import."""

import os
from typing import Any

import torch

from rankzero.distributed.coordination.coordinator import Coordinator
from rankzero.distributed.environments.launch_problems import launch_problems
from rankzero.distributed.monitoring.hangs import describe_ranks
from rankzero.distributed.process.system import usable_cores
from rankzero.distributed.world import World
from rankzero.preflight.check import FAIL, OK, SKIPPED, WARN, Check, check_on_rank_zero

MAX_LISTED = 64
"""How many processes are printed; the JSON file has all."""

SLOW_IMPORT_SECONDS = 20.0


def check_launcher(coordinator: Coordinator, world: World) -> Check:
    """Reports the detected launcher, and threads and cores per rank. All ranks must call."""
    launch, hosts, gpus = coordinator.world.launch, coordinator.world.hosts, torch.cuda.device_count()
    hides_gpus = world.accelerator == "cuda" and gpus == 1 and world.devices > 1 and not world.shares_gpu
    uses_gloo = world.backend == "gloo" and world.size > 1
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    own = {
        "threads": torch.get_num_threads(),
        "cores": len(usable_cores()),
        "machine_cpus": os.cpu_count() or 1,
        "visible_gpus": gpus,
        "problems": [problem._asdict() for problem in launch_problems(launch, cpus, hides_gpus, uses_gloo)],
    }

    def check(ranks: list[dict[str, Any]]) -> Check:
        ranks_with: dict[str, list[int]] = {}
        for rank, values in enumerate(ranks):
            for found in values["problems"]:
                ranks_with.setdefault(found["problem"], []).append(rank)
        problems = [found for values in ranks for found in values["problems"]]
        details = [f"{problem}: {describe_ranks(affected, hosts)}" for problem, affected in ranks_with.items()]
        status = FAIL if any(found["ends_run"] for found in problems) else WARN if problems else OK
        threads = sorted({values["threads"] for values in ranks})
        cores = sorted({values["cores"] for values in ranks})
        summary = (
            f"{launch.launcher} ({launch.evidence}): {launch.shape} on {world.accelerator}, "
            f"{_range(threads, 'thread')} and {_range(cores, 'core')} per rank"
        )
        advice = list(dict.fromkeys(found["advice"] for found in problems))
        values = {"launcher": launch.launcher, "variables": dict(launch.variables), "ranks": ranks}
        return Check("launcher", status, summary, details, advice, values)

    return check_on_rank_zero(coordinator, own, check)


def check_processes(coordinator: Coordinator, world: World, seconds: float | None) -> Check:
    """Lists host, rank, local rank, device and process id of every process. All ranks must call.

    If a process is missing, the rendezvous has already failed and named it.
    """
    device = f"{world.accelerator}:{world.index}" if world.accelerator == "cuda" else world.accelerator
    devices = coordinator.decide(device, list)
    rows = [
        {"rank": member.rank, "host": member.host, "local_rank": member.local_rank, "device": device, "pid": member.pid}
        for member, device in zip(coordinator.world.peers.values(), devices, strict=True)
    ]
    lines = [
        f"rank {row['rank']} on {row['host']}, local rank {row['local_rank']}, {row['device']}, process {row['pid']}"
        for row in rows[:MAX_LISTED]
    ]
    lines += [f"and {len(rows) - MAX_LISTED} more"] * (len(rows) > MAX_LISTED)
    count, hosts = len(rows), len(set(coordinator.world.hosts))
    summary = f"all {count} processes on {hosts} host{'s' * (hosts > 1)} have connected"
    if seconds is not None:
        summary += f", after {seconds:.1f} s"
    if count == 1:
        summary = f"one process on {rows[0]['host']}"
    return Check("rendezvous", OK, summary, lines, values={"ranks": rows, "seconds": seconds})


def check_imports(coordinator: Coordinator, seconds: float | None) -> Check:
    """Reports how long each rank took to import torch. All ranks must call."""
    if seconds is None:
        return Check("imports", SKIPPED, "torch was imported before the checks")
    times: list[float] = coordinator.decide(round(seconds, 2), list)
    slowest = max(range(len(times)), key=lambda rank: times[rank])
    slowest_rank = f"rank {slowest} on {coordinator.world.hosts[slowest]}"
    summary = f"torch was imported within {times[slowest]:.1f} s (the slowest: {slowest_rank})"
    is_slow = times[slowest] > SLOW_IMPORT_SECONDS
    advice = (
        "a shared file system that serves thousands of small files is slow when its cache is cold: copy the virtual "
        "environment to a local disk of each node, or use a container image or squashfs file"
    )
    return Check("imports", WARN if is_slow else OK, summary, (), [advice] * is_slow, {"seconds": times})


def _range(numbers: list[int], noun: str) -> str:
    text = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
    return f"{text} {noun}{'s' * (numbers[-1] > 1)}"
