"""Checks the training data, the processes that load it, and steps of the model."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median_low
from typing import Any

from rankzero.distributed.coordination.coordinator import Coordinator
from rankzero.distributed.monitoring.slow_ranks import slow_ranks
from rankzero.distributed.process.limits.cores import usable_cores
from rankzero.preflight.check import FAIL, OK, WARN, Check, error_lines, gather
from rankzero.preflight.trial import Trial
from rankzero.sampling.fingerprint import differences_between_ranks

_NO_GROUP = "process group has not been initialized"
"""Part of torch's message for a collective without a process group."""

SHARED_MEMORY = Path("/dev/shm")


def check_data(fingerprints: Sequence[Mapping[str, str]], errors: Mapping[int, str], hosts: Sequence[str]) -> Check:
    """Compares the training data of all ranks.

    Args:
        fingerprints: Fingerprint of each rank's training data, see `rankzero.sampling.fingerprint`; {} if unknown.
        errors: Error of each rank that could not read its data.
        hosts: Host of each rank.
    """
    if errors:
        advice = ["correct the error shown above; all hosts need the same data"]
        summary = "the training data cannot be read"
        return Check("data", FAIL, summary, error_lines(errors, hosts), advice, {"errors": dict(errors)})
    details = differences_between_ranks(fingerprints, hosts)
    values = {"ranks": list(fingerprints)}
    if details:
        advice = ["use the same files on all hosts; if a script generates the data at random, set a seed"]
        return Check("data", FAIL, "the training data differs between ranks", details, advice, values)
    samples = fingerprints[0].get("samples")
    summary = f"{samples} samples, the same on all ranks" if samples else "readable; the data set has no fingerprint"
    return Check("data", OK, summary, values=values)


def check_workers(coordinator: Coordinator, workers: int, prefetched_bytes: int) -> Check:
    """Compares the loader processes of each host with its cores and its shared memory. All ranks must call.

    Args:
        coordinator: Exchanges values between all ranks.
        workers: Number of loader processes of this rank.
        prefetched_bytes: Size of the batches in bytes that the loader processes of this rank may hold.
    """
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None
    own = {"workers": workers, "cores": sorted(usable_cores()), "shared_memory": free, "needed": prefetched_bytes}
    ranks: list[dict[str, Any]] = coordinator.all_gather_object(own)
    ranks_on: dict[str, list[dict[str, Any]]] = {}
    for host, values in zip(coordinator.hosts, ranks, strict=True):
        ranks_on.setdefault(host, []).append(values)
    details: list[str] = []
    advice: dict[str, None] = {}
    has_failed = False
    for host, local_ranks in ranks_on.items():
        count, cores = sum(values["workers"] for values in local_ranks), len(_union(local_ranks))
        if count > cores:
            details.append(f"{host} has {count} loader processes on {cores} core{'s' * (cores > 1)}")
            fair_share = max(1, cores // len(local_ranks))
            advice[f"--data.num_workers {fair_share}, or more cores per rank"] = None
        needed, free = sum(values["needed"] for values in local_ranks), local_ranks[0]["shared_memory"]
        if free is not None and needed > free:
            has_failed |= needed > 2 * free  # seldom are all batches in memory at the same time
            details.append(
                f"{SHARED_MEMORY} on {host} has {free / 1e6:,.0f} MB free, and the loader processes of this host need "
                f"up to {needed / 1e6:,.0f} MB"
            )
            size = 2 * needed // 2**30 + 1
            advice[f"docker run --shm-size={size}g or --ipc=host, or --data.num_workers N with a smaller N"] = None
    summary = f"{workers} loader process{'es' * (workers != 1)} per rank"
    status = FAIL if has_failed else WARN if details else OK
    return Check("loader processes", status, summary, details, list(advice), {"ranks": ranks})


def check_steps(coordinator: Coordinator, trial: Trial) -> Check:
    """Trains a few steps on every rank, without communication. All ranks must call.

    Args:
        coordinator: Exchanges values between all ranks.
        trial: Has loaded its batch on all ranks.
    """
    name, hosts = "training steps", coordinator.hosts
    results, errors = gather(coordinator, trial.train)
    if errors and all(_NO_GROUP in text for text in errors.values()):
        summary = "not tried, because the model communicates by itself"
        return Check(name, WARN, summary, error_lines(errors, hosts), values={"errors": errors})
    if errors:
        is_memory = any("out of memory" in text.lower() or "OutOfMemory" in text for text in errors.values())
        remedy = "--batch_size N with a smaller N, or --max_device_batch_size N to accumulate gradients"
        advice = [remedy if is_memory else "correct the error shown above"]
        summary = "a step of the model fails"
        return Check(name, FAIL, summary, error_lines(errors, hosts), advice, {"errors": errors})
    seconds = {rank: result["seconds"] for rank, result in enumerate(results) if result and result["seconds"]}
    if not seconds:
        return Check(name, WARN, "no rank has a sample in the first batch")
    slow, middle = slow_ranks(seconds), median_low(seconds.values())
    details = [
        f"rank {rank} on {hosts[rank]} takes {1e3 * seconds[rank]:,.1f} ms, "
        f"{seconds[rank] / middle:.1f} times the median"
        for rank in slow
    ]
    alternative = ", or start the job without this host" if len(set(hosts)) > 1 else ""
    advice = [f"look for other programs on {hosts[rank]} (top, nvidia-smi){alternative}" for rank in slow[:4]]
    peak = max(result["peak_bytes"] for result in results if result)
    memory = f"{peak / 1e9:,.1f} GB of {'GPU memory' if trial.device.type == 'cuda' else 'memory, with all imports'}"
    summary = f"a step takes {1e3 * middle:,.1f} ms without communication, and at most {memory}"
    return Check(name, WARN if slow else OK, summary, details, advice, {"ranks": results})


def _union(ranks: Sequence[Mapping[str, Any]]) -> set[int]:
    return {core for values in ranks for core in values["cores"]}
