"""The processor cores that this process may use: its affinity, and the CPU quota of its cgroup. Imports no torch."""

import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

TOPOLOGY = Path("/sys/devices/system/cpu")
PROCESS = Path("/proc/self")


class Quota(NamedTuple):
    """The CPU time that a cgroup allows its processes.

    Args:
        cpus: CPUs' worth of time, such as 1.5.
        cgroup: Identifies the cgroup that has the limit, on one machine.
    """

    cpus: float
    cgroup: str


def usable_cores(process_id: int = 0) -> frozenset[int]:
    """The cores that a process is allowed to run on, 0 being this process.

    Hardware threads of one core count once, as they do in torch's own default (through MKL).

    Raises:
        OSError: There is no such process.
    """
    if not hasattr(os, "sched_getaffinity"):  # not Linux
        return frozenset(range(os.cpu_count() or 1))
    return frozenset(_core_of(cpu) for cpu in os.sched_getaffinity(process_id))


@cache
def _core_of(cpu: int) -> int:
    """The first hardware thread of the core that this hardware thread belongs to."""
    try:
        siblings = (TOPOLOGY / f"cpu{cpu}/topology/thread_siblings_list").read_text()
        return min(parse_cpus(siblings))
    except (OSError, ValueError):
        return cpu


def parse_cpus(text: str) -> frozenset[int]:
    """Reads Linux's notation of CPUs: `0-2,8` is 0, 1, 2, 8.

    Raises:
        ValueError: It is another notation.
    """
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def format_cpus(cpus: Iterable[int]) -> str:
    """Writes CPUs in Linux's notation."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], cpu]
        else:
            runs.append([cpu])
    return ",".join("-".join(map(str, run)) for run in runs)


def cpu_quota(process: Path = PROCESS) -> Quota | None:
    """The lowest CPU quota of this process's cgroup and of those around it; None without any (cgroup v1 and v2)."""
    quotas = [quota for folder in _cgroup_folders(process) if (quota := _quota_of(folder))]
    return min(quotas, key=lambda quota: quota.cpus, default=None)


def _cgroup_folders(process: Path) -> list[Path]:
    """The folders of this process's cgroups that may limit its CPU time, the outermost first."""
    try:
        memberships = [line.split(":", 2) for line in (process / "cgroup").read_text().splitlines()]
        mounts = [line.split() for line in (process / "mountinfo").read_text().splitlines()]
    except OSError:
        return []
    folders: list[Path] = []
    for _, controllers, path in memberships:
        for mount in mounts:
            root, mount_point, kind, options = mount[3], mount[4], *_type_and_options(mount)
            is_version_1 = kind == "cgroup" and "cpu" in options and "cpu" in controllers.split(",")
            if is_version_1 or (kind == "cgroup2" and not controllers):
                folders += _nested(Path(mount_point), path, root)
    return folders


def _type_and_options(mount: list[str]) -> tuple[str, list[str]]:
    """The file system of a line of mountinfo and its own options; optional fields come before them (proc(5))."""
    separator = mount.index("-")
    return mount[separator + 1], mount[-1].split(",")


def _nested(mount_point: Path, path: str, root: str) -> list[Path]:
    """The folders from the mount point down to a cgroup's own.

    A container may see its cgroup's full path but only its own part of the tree: then the mount point is its cgroup.
    """
    try:
        below = Path(path).relative_to(root)
    except ValueError:
        return [mount_point]
    folder = mount_point / below
    return [*reversed([parent for parent in folder.parents if parent.is_relative_to(mount_point)]), folder]


def _quota_of(folder: Path) -> Quota | None:
    """The limit that one cgroup has of its own."""
    try:
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        if quota in ("max", "-1"):
            return None
        status = folder.stat()
        return Quota(int(quota) / int(period), f"{status.st_dev}:{status.st_ino}")
    except (OSError, ValueError, ZeroDivisionError):
        return None
