"""Checks cores, shared memory and the time and memory of a step."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median_low
from typing import Any

from rankzero.distributed.coordinator import Coordinator
from rankzero.distributed.monitoring.slow_ranks import slow_ranks
from rankzero.distributed.process.cores import usable_cores
from rankzero.preflight.check import FAIL, OK, WARN, Check, gather
from rankzero.preflight.trial import Trial

SHARED_MEMORY = Path("/dev/shm")

PREFETCHED_BATCHES = 2
"""Batches that each loader process holds in shared memory by default."""


def check_workers(coordinator: Coordinator, loaded: Sequence[Mapping[str, Any]]) -> Check:
    """Compares loader processes with cores, and the batches that they hold with shared memory. All ranks must call.

    Args:
        coordinator: Exchanges values between all ranks.
        loaded: Result of `Trial.load_batch` of each rank.
    """
    hosts, local_ranks = [member.host for member in coordinator.members], coordinator.launch.local_world_size or 1
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None
    own = loaded[coordinator.launch.rank or 0]
    needed = PREFETCHED_BATCHES * own["workers"] * own["batch_bytes"] * local_ranks
    values = {"workers": own["workers"], "cores": len(usable_cores()), "shared_memory": free, "needed": needed}
    ranks: list[dict[str, Any]] = coordinator.all_gather_object(values)
    details, advice = [], []
    crowded = [rank for rank, values in enumerate(ranks) if values["workers"] > values["cores"]]
    if crowded:
        rank = crowded[0]
        cores = ranks[rank]["cores"]
        details.append(
            f"rank {rank} on {hosts[rank]} has {ranks[rank]['workers']} loader processes on {cores} "
            f"core{'s' * (cores > 1)}"
        )
        advice.append(f"num_workers={max(1, cores - 1)}, or more cores per rank")
    small = [
        rank
        for rank, values in enumerate(ranks)
        if values["shared_memory"] is not None and values["needed"] > values["shared_memory"]
    ]
    if small:
        rank = small[0]
        details.append(
            f"{SHARED_MEMORY} on {hosts[rank]} has {ranks[rank]['shared_memory'] / 1e6:,.0f} MB free, and the loader "
            f"processes of this machine need {ranks[rank]['needed'] / 1e6:,.0f} MB"
        )
        advice.append("docker run --shm-size=8g or --ipc=host, or fewer loader processes")
    summary = f"{own['workers']} loader processes per rank and {values['cores']} cores"
    status = FAIL if small else WARN if crowded else OK
    return Check("loader processes", status, summary, details, advice, {"ranks": ranks})


def check_step(coordinator: Coordinator, trial: Trial) -> Check:
    """Trains a few steps on every rank, without communication. All ranks must call.

    Args:
        coordinator: Exchanges values between all ranks.
        trial: Has loaded its batch on all ranks.
    """
    hosts = [member.host for member in coordinator.members]
    results, errors = gather(coordinator, trial.train)
    if errors:
        details = [f"rank {rank} on {hosts[rank]}: {text.splitlines()[0]}" for rank, text in errors.items()]
        is_memory = any("out of memory" in text.lower() or "OutOfMemory" in text for text in errors.values())
        remedy = "--batch_size with a smaller number, or --max_device_batch_size to accumulate gradients"
        advice = [remedy if is_memory else "correct this error in the model or its data"]
        return Check("one step", FAIL, "a step of the model fails", details, advice, {"errors": errors})
    seconds = {rank: result["seconds"] for rank, result in enumerate(results) if result}
    slow = slow_ranks(seconds)
    median = median_low(seconds.values())
    peak = max(result["peak_bytes"] for result in results if result)
    details = [
        f"rank {rank} on {hosts[rank]} takes {1e3 * seconds[rank]:,.1f} ms, "
        f"{seconds[rank] / median:.1f} times the median"
        for rank in slow
    ]
    alternative = ", or exclude it" if len(set(hosts)) > 1 else ""
    advice = [f"see which programs run on {hosts[rank]}{alternative}" for rank in slow[:4]]
    summary = f"a step takes {1e3 * median:,.1f} ms without communication; peak memory {peak / 1e9:,.1f} GB"
    return Check("one step", WARN if slow else OK, summary, details, advice, {"ranks": results})
