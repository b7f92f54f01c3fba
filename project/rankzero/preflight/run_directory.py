"""Checks that the folder of the runs is shared, writable and large enough."""

import os
import shutil
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from rankzero.distributed.coordination.coordinator import Coordinator
from rankzero.distributed.monitoring.hangs import describe_ranks
from rankzero.preflight.check import FAIL, OK, WARN, Check, error_lines, gather
from rankzero.runs.directory import expanded
from rankzero.runs.rank_log import SHARED_FOLDER_ADVICE, wait_until_visible

SLOW_FSYNC_SECONDS = 1.0


def check_run_directory(coordinator: Coordinator, root: Path, checkpoint_bytes: int, keep: int) -> Check:
    """Checks that all ranks see the same writable root folder, and that it has space. All ranks must call."""
    hosts, rank = coordinator.world.hosts, coordinator.world.rank
    folder = expanded(root) / f".preflight-{coordinator.broadcast_object(uuid.uuid4().hex)}"
    created, errors = gather(coordinator, lambda: _create(folder) if rank == 0 else 0)
    if errors:
        summary = f"rank 0 on {hosts[0]} cannot write in {root}: {errors[0]}"
        return Check("run directory", FAIL, summary, (), ["--root DIR, where DIR is a folder in which you may write"])
    try:
        shared, unreadable = gather(coordinator, lambda: wait_until_visible((folder / "0").exists, folder))
        results, errors = gather(coordinator, lambda: _probe(folder, rank))
    finally:
        if rank == 0:  # all ranks have probed, or the preflight ends with an error
            _remove(folder, int(created[0] or 0))
    separate = [rank for rank, is_visible in enumerate(shared) if is_visible is False]
    errors = {rank: error for rank, error in (errors | unreadable).items() if rank not in separate}
    free = min((result["free_bytes"] for result in results if result), default=0)
    fsync = max((result["fsync_seconds"] for result in results if result), default=0.0)
    needed = checkpoint_bytes * (keep + 1)
    is_small = not errors and not separate and free < needed
    is_full = is_small and free < checkpoint_bytes
    details = error_lines(errors, hosts)
    advice = ["make --root DIR writable on all hosts, or name another DIR"] * bool(errors)
    if separate:
        details.append(f"{root} on {describe_ranks(separate, hosts)} is not the same folder as on rank 0")
        advice.append(SHARED_FOLDER_ADVICE)
    if is_small:
        details.append(f"{_gigabytes(free)} are free, and {keep + 1} checkpoints need {_gigabytes(needed)}")
        advice.append("delete files, --keep N with a smaller N, or --root DIR on another disk")
    if fsync > SLOW_FSYNC_SECONDS:
        details.append(f"writing 1 MiB to the disk takes {fsync:.1f} s")
        advice.append("--root DIR on a faster disk")
    has_failed = bool(separate or errors or is_full)
    summary = f"{root}: shared, writable, {_gigabytes(free)} free; fsync of 1 MiB takes {1e3 * fsync:.0f} ms"
    if has_failed:
        summary = f"{root} has too little space" if is_full else f"{root} is not shared and writable on all ranks"
    values = {"root": str(root), "ranks": results, "needed_bytes": needed}
    return Check("run directory", FAIL if has_failed else WARN if details else OK, summary, details, advice, values)


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


def _probe(folder: Path, rank: int) -> dict[str, Any]:
    """Writes a file to the disk; returns the seconds and the free space."""
    file = folder / f"rank-{rank}"
    with file.open("wb") as stream:
        stream.write(bytes(1 << 20))
        stream.flush()
        started = time.perf_counter()
        os.fsync(stream.fileno())
    seconds = time.perf_counter() - started
    return {"fsync_seconds": round(seconds, 6), "free_bytes": shutil.disk_usage(folder).free}


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.1f} GB"
