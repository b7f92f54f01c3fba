"""Memory that a process may use. Does not import torch."""

from pathlib import Path

import psutil

from rankzero.distributed.process.cores import PROC_SELF, cgroup_folders

_FILES_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_FILES_2 = ("memory.max", "memory.current", "inactive_file")
"""Limit, usage, and the line of memory.stat with the bytes that the kernel can reuse."""


def available_memory(process_folder: Path = PROC_SELF) -> int:
    """Returns the bytes of memory that this process and the others of its cgroup can still use.

    Memory that holds copies of files counts as available, since the kernel reuses it.
    """
    limits = [
        free for folder in cgroup_folders(process_folder, "memory") if (free := _free_memory_of(folder)) is not None
    ]
    return min([psutil.virtual_memory().available, *limits])


def _free_memory_of(folder: Path) -> int | None:
    """Returns the bytes that the limit of one cgroup itself leaves; None without a limit."""
    try:
        is_version_2 = (folder / "memory.max").is_file()
        limit, usage, statistic = _FILES_2 if is_version_2 else _FILES_1
        used = int((folder / usage).read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, int((folder / limit).read_text()) - used + int(statistics[statistic]))  # `max`: ValueError
    except (OSError, ValueError, KeyError):
        return None
