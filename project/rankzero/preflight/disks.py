"""Checks the run directory and the data on all ranks."""

import os
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rankzero.distributed.coordinator import Coordinator
from rankzero.preflight.check import FAIL, OK, SKIPPED, WARN, Check, describe_ranks, differences, gather

SHARED_SECONDS = 10.0
"""How long a rank waits until it sees a file of rank zero; a network file system may cache a listing."""

SLOW_FSYNC_SECONDS = 1.0
SLOW_IMPORT_SECONDS = 20.0
PROBE_BYTES = 1 << 20


def check_run_directory(coordinator: Coordinator, root: Path, checkpoint_bytes: int, keep: int) -> Check:
    """Checks that all ranks see the same root folder, that it is writable, and that it has space. All ranks must call.

    Args:
        coordinator: Exchanges values between all ranks.
        root: Folder of the runs, `--root`; it need not exist.
        checkpoint_bytes: Approximate size of a checkpoint.
        keep: Number of checkpoints that are kept.
    """
    hosts = [member.host for member in coordinator.members]
    token, rank = coordinator.all_gather_object(uuid.uuid4().hex)[0], coordinator.launch.rank or 0
    folder = root.expanduser() / f".preflight-{token}"
    created, create_errors = gather(coordinator, lambda: _create(folder) if rank == 0 else 0)
    if create_errors:
        summary = f"rank 0 on {hosts[0]} cannot write in {root}: {create_errors[0]}"
        return Check("run directory", FAIL, summary, (), ["--root DIR, where DIR is a folder in which you may write"])
    try:
        shared, _ = gather(coordinator, lambda: _appears(folder / "0"))
        results, errors = gather(coordinator, lambda: _probe(folder, rank))
    finally:
        coordinator.all_gather_object(None)
        if rank == 0:
            _remove(folder, int(created[0] or 0))
    separate = [rank for rank, appears in enumerate(shared) if not appears]
    free = min((result["free_bytes"] for result in results if result), default=0)
    fsync = max((result["fsync_seconds"] for result in results if result), default=0.0)
    needed = checkpoint_bytes * (keep + 1)
    details: list[str] = []
    advice: list[str] = []
    if separate:
        details.append(f"{root} is another folder than rank 0's on {describe_ranks(separate, hosts)}")
        advice.append("--root DIR, where DIR is on a file system that all hosts share")
    failing = [rank for rank in errors if rank not in separate]
    details += [f"rank {rank} on {hosts[rank]} cannot write: {errors[rank]}" for rank in failing]
    advice += ["make the folder writable on all hosts, or --root DIR"] * bool(failing)
    if free < needed:
        details.append(f"{_gigabytes(free)} are free, and {keep + 1} checkpoints need {_gigabytes(needed)}")
        advice.append("free space, --keep a smaller number, or --root DIR on another disk")
    if fsync > SLOW_FSYNC_SECONDS:
        details.append(f"writing 1 MiB to the disk takes {fsync:.1f} s")
    status = FAIL if separate or failing or free < needed else WARN if details else OK
    summary = f"{root}: shared, writable, {_gigabytes(free)} free; fsync of 1 MiB takes {1e3 * fsync:.0f} ms"
    if separate or failing:
        summary = f"{root} is not shared and writable on all ranks"
    elif free < needed:
        summary = f"{root} has too little space"
    values = {"root": str(root), "ranks": results, "needed_bytes": needed}
    return Check("run directory", status, summary, details, advice, values)


def check_data(coordinator: Coordinator, fingerprints: Sequence[Mapping[str, str]], errors: Mapping[int, str]) -> Check:
    """Compares the training data of all ranks.

    Args:
        coordinator: Knows the host of each rank.
        fingerprints: Fingerprint of each rank's training data, see `rankzero.sampling.fingerprint`; {} if unknown.
        errors: Error of each rank that could not read its data.
    """
    hosts = [member.host for member in coordinator.members]
    if errors:
        lines = [f"rank {rank} on {hosts[rank]}: {text}" for rank, text in errors.items()]
        advice = ("correct this error; all hosts need the same data",)
        return Check("data", FAIL, "the training data cannot be read", lines, advice, {"errors": dict(errors)})
    names = list(dict.fromkeys(name for values in fingerprints for name in values))
    details: list[str] = []
    for name in names:
        texts = differences([values.get(name, "missing") for values in fingerprints], hosts)
        details += [f"{name}: {'; '.join(texts)}"] * bool(texts)
    values = {"ranks": list(fingerprints)}
    if details:
        advice = ("use the same files on all hosts; seed data that a script makes at random",)
        return Check("data", FAIL, "the training data differs between ranks", details, advice, values)
    samples = fingerprints[0].get("samples")
    summary = f"{samples} samples, the same on all ranks" if samples else "read; the data set has no fingerprint"
    return Check("data", OK, summary, values=values)


def check_imports(coordinator: Coordinator, seconds: float | None) -> Check:
    """Reports how long each host took to import torch. All ranks must call.

    Args:
        coordinator: Exchanges values between all ranks.
        seconds: Seconds that this process took; None if unknown.
    """
    if seconds is None:
        return Check("imports", SKIPPED, "torch was imported before the checks")
    hosts = [member.host for member in coordinator.members]
    times: list[float] = coordinator.all_gather_object(round(seconds, 2))
    slowest = max(range(len(times)), key=lambda rank: times[rank])
    summary = f"torch was imported within {times[slowest]:.1f} s (the slowest: rank {slowest} on {hosts[slowest]})"
    values = {"seconds": times}
    if times[slowest] <= SLOW_IMPORT_SECONDS:
        return Check("imports", OK, summary, values=values)
    advice = (
        "a shared file system that serves thousands of small files is slow when its cache is cold: copy the virtual "
        "environment to a local disk of each node, or use a container image or squashfs file",
    )
    return Check("imports", WARN, summary, (), advice, values)


def _create(folder: Path) -> int:
    """Creates a folder with a file; returns the number of parents that were missing."""
    missing_parents = sum(not parent.exists() for parent in folder.parents)
    folder.mkdir(parents=True)
    (folder / "0").write_text("")
    return missing_parents


def _remove(folder: Path, parents: int) -> None:
    """Removes a folder that `_create` has created, and as many of its parents, unless they contain something else."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        for parent in list(folder.parents)[:parents]:
            parent.rmdir()


def _appears(file: Path) -> bool:
    deadline = time.monotonic() + SHARED_SECONDS
    while not file.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
        try:
            list(file.parent.iterdir())  # lets NFS refresh its cache
        except OSError:
            continue
    return True


def _probe(folder: Path, rank: int) -> dict[str, Any]:
    """Writes a file to the disk; returns the seconds and the free space."""
    file = folder / f"rank-{rank}"
    with file.open("wb") as stream:
        stream.write(bytes(PROBE_BYTES))
        stream.flush()
        started = time.perf_counter()
        os.fsync(stream.fileno())
    seconds = time.perf_counter() - started
    return {"fsync_seconds": round(seconds, 6), "free_bytes": shutil.disk_usage(folder).free}


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.1f} GB"
