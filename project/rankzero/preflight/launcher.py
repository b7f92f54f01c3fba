"""Checks which processes the launcher has started, and its settings that cost speed."""

import os
from typing import Any

import torch

from rankzero.distributed.coordinator import Coordinator
from rankzero.distributed.devices import WorldInfo
from rankzero.distributed.environments.costly_settings import costly_settings
from rankzero.distributed.process.cores import usable_cores
from rankzero.preflight.check import FAIL, OK, WARN, Check, describe_ranks

MAX_LISTED = 64
"""How many processes are printed; the JSON file has all."""


def check_launcher(coordinator: Coordinator, world: WorldInfo) -> Check:
    """Reports the detected launcher, and threads and cores per rank. All ranks must call."""
    launch, cores, gpus = coordinator.launch, len(usable_cores()), torch.cuda.device_count()
    own = {
        "threads": torch.get_num_threads(),
        "cores": cores,
        "machine_cores": os.cpu_count() or 1,
        "visible_gpus": gpus,
        "costly_settings": [setting._asdict() for setting in costly_settings(launch, cores, gpus)],
    }
    ranks: list[dict[str, Any]] = coordinator.all_gather_object(own)
    hosts = [member.host for member in coordinator.members]
    ranks_with: dict[str, list[int]] = {}
    for rank, values in enumerate(ranks):
        for setting in values["costly_settings"]:
            ranks_with.setdefault(setting["problem"], []).append(rank)
    found = [setting for values in ranks for setting in values["costly_settings"]]
    details = [f"{problem}: {describe_ranks(affected, hosts)}" for problem, affected in ranks_with.items()]
    status = FAIL if any(setting["ends_run"] for setting in found) else WARN if found else OK
    threads = sorted({values["threads"] for values in ranks})
    numbers_of_cores = sorted({values["cores"] for values in ranks})
    summary = (
        f"{launch.launcher} ({launch.evidence}): {launch.shape} on {world.accelerator}, "
        f"{_range(threads, 'thread')} and {_range(numbers_of_cores, 'core')} per rank"
    )
    advice = tuple(dict.fromkeys(setting["advice"] for setting in found))
    values = {"launcher": launch.launcher, "variables": dict(launch.variables), "ranks": ranks}
    return Check("launcher", status, summary, details, advice, values)


def check_processes(coordinator: Coordinator, world: WorldInfo, seconds: float | None) -> Check:
    """Lists host, rank, local rank, device and process id of every process. All ranks must call.

    A missing process has ended the rendezvous before, with a message that names it.

    Args:
        coordinator: The processes.
        world: The devices of all processes.
        seconds: Seconds from the start of this process to the end of the rendezvous; None if unknown.
    """
    device = f"{world.accelerator}:{world.index}" if world.accelerator == "cuda" else world.accelerator
    devices = coordinator.all_gather_object(device)
    rows = [
        {"rank": member.rank, "host": member.host, "local_rank": member.local_rank, "device": device, "pid": member.pid}
        for member, device in zip(coordinator.members, devices, strict=True)
    ]
    lines = [
        f"rank {row['rank']} on {row['host']}, local rank {row['local_rank']}, {row['device']}, process {row['pid']}"
        for row in rows[:MAX_LISTED]
    ]
    if len(rows) > MAX_LISTED:
        lines.append(f"and {len(rows) - MAX_LISTED} more")
    count, hosts = len(rows), len({member.host for member in coordinator.members})
    summary = f"all {count} processes on {hosts} host{'s' * (hosts > 1)} have connected"
    if seconds is not None:
        summary += f", after {seconds:.1f} s"
    if count == 1:
        summary = f"one process on {rows[0]['host']}"
    return Check("rendezvous", OK, summary, lines, values={"ranks": rows, "seconds": seconds})


def _range(numbers: list[int], noun: str) -> str:
    text = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
    return f"{text} {noun}{'s' * (numbers[-1] > 1)}"
