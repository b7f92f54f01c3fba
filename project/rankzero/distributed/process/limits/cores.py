"""CPU cores that a process may use: its affinity, and the CPU quota of its cgroup. Does not import torch."""

import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from rankzero.distributed.process.limits.cgroups import PROC_SELF, cgroup_folders

TOPOLOGY = Path("/sys/devices/system/cpu")
PCI_DEVICES = Path("/sys/bus/pci/devices")


class Quota(NamedTuple):
    """CPU time limit of a cgroup.

    Args:
        cpus: CPU seconds per second, such as 1.5.
        cgroup: Identifier of the cgroup that has the limit, unique on its machine.
    """

    cpus: float
    cgroup: str


def usable_cores(process_id: int = 0) -> frozenset[int]:
    """Returns the cores on which a process may run; process id 0 means this process.

    All hardware threads of a core count as one core, as in torch's default number of threads (through MKL).

    Raises:
        OSError: The process does not exist.
    """
    if not hasattr(os, "sched_getaffinity"):  # not Linux
        return frozenset(range(os.cpu_count() or 1))
    return frozenset(_core_of(cpu) for cpu in os.sched_getaffinity(process_id))


@cache
def _core_of(cpu: int) -> int:
    """Returns the first hardware thread of the core to which hardware thread `cpu` belongs."""
    try:
        siblings = (TOPOLOGY / f"cpu{cpu}/topology/thread_siblings_list").read_text()
        return min(parse_cpus(siblings))
    except (OSError, ValueError):
        return cpu


def cpus_near(pci: str) -> frozenset[int]:
    """Returns the hardware threads next to a PCI device on which this process may run; none if they are unknown."""
    try:
        return parse_cpus((PCI_DEVICES / pci / "local_cpulist").read_text()) & os.sched_getaffinity(0)
    except (OSError, ValueError):  # not Linux, or a virtual machine
        return frozenset()


def parse_cpus(text: str) -> frozenset[int]:
    """Parses Linux's notation of CPUs: `0-2,8` is 0, 1, 2, 8.

    Raises:
        ValueError: The text is not in this notation.
    """
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def format_cpus(cpus: Iterable[int]) -> str:
    """Formats CPUs in Linux's notation, such as `0-2,8`."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and cpu == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], cpu]
        else:
            ranges.append([cpu])
    return ",".join("-".join(map(str, cpu_range)) for cpu_range in ranges)


def cpu_quota(process_folder: Path = PROC_SELF) -> Quota | None:
    """Returns the lowest CPU quota of this process's cgroup and its parents; None without one (cgroup v1 and v2)."""
    quotas = [quota for folder in cgroup_folders(process_folder, "cpu") if (quota := _quota_of(folder))]
    return min(quotas, key=lambda quota: quota.cpus, default=None)


def _quota_of(folder: Path) -> Quota | None:
    """Returns the limit set on one cgroup itself; None without one."""
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
