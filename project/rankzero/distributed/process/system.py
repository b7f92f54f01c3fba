"""What the system reports about processes: cores, memory, state, namespace and ancestors; environment variables."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import psutil

PROC_SELF = Path("/proc/self")


def cgroup_folders(process_folder: Path, controller: str) -> list[Path]:
    """Returns the folders of all cgroups that may limit `cpu` or `memory` (the controller), outermost first."""
    try:
        memberships = [line.split(":", 2) for line in (process_folder / "cgroup").read_text().splitlines()]
        mounts = [line.split() for line in (process_folder / "mountinfo").read_text().splitlines()]
    except OSError:
        return []
    folders: list[Path] = []
    for _, controllers, path in memberships:
        for mount in mounts:
            root, mount_point, options = mount[3], mount[4], mount[-1].split(",")  # see proc(5)
            file_system_type = mount[mount.index("-") + 1]
            is_version_1 = (
                file_system_type == "cgroup" and controller in options and controller in controllers.split(",")
            )
            if is_version_1 or (file_system_type == "cgroup2" and not controllers):
                folders += _folders_on_path(Path(mount_point), path, root)
    return folders


def _folders_on_path(mount_point: Path, path: str, root: str) -> list[Path]:
    """Returns the folders from the mount point down to a cgroup's folder.

    A container may see its cgroup's full path but only its own subtree. The mount point is then the cgroup's folder.
    """
    try:
        relative_path = Path(path).relative_to(root)
    except ValueError:
        return [mount_point]
    folder = mount_point / relative_path
    return [*reversed([parent for parent in folder.parents if parent.is_relative_to(mount_point)]), folder]


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
        return min(parse_cpus((TOPOLOGY / f"cpu{cpu}/topology/thread_siblings_list").read_text()))
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
        limit, usage, statistic = _FILES_2 if (folder / _FILES_2[0]).is_file() else _FILES_1
        used = int((folder / usage).read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, int((folder / limit).read_text()) - used + int(statistics[statistic]))  # `max`: ValueError
    except (OSError, ValueError, KeyError):
        return None


def process_state(pid: int) -> tuple[str, str] | None:
    """Returns state and start time of a process on this host; None if the process does not exist.

    The start time is in clock ticks since boot, as text, see proc(5). Without /proc, both texts are empty.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        has_proc = Path("/proc/self/stat").exists()
        return None if has_proc or not psutil.pid_exists(pid) else ("", "")
    return fields[0], fields[19]


def process_namespace() -> str:
    """Returns the PID namespace, which distinguishes equal process ids of two containers; empty if unsupported."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def ancestor_commands() -> Iterator[list[str]]:
    """Yields the command-line arguments of each ancestor, parent first; ends at the first that cannot be read."""
    with suppress(psutil.Error):
        for ancestor in ancestors():
            yield ancestor.cmdline()


def ancestors() -> Iterator[psutil.Process]:
    """Yields the ancestors of this process, parent first.

    Raises:
        psutil.Error: An ancestor cannot be read.
    """
    ancestor: psutil.Process | None = psutil.Process(os.getppid())
    while ancestor:
        yield ancestor
        ancestor = ancestor.parent()


@contextmanager
def variables(**values: str) -> Iterator[None]:
    """Sets environment variables within a `with` block, for libraries that read them only there."""
    previous = {name: os.environ.get(name) for name in values}
    os.environ |= values
    try:
        yield
    finally:
        for name, value in previous.items():
            del os.environ[name]
            os.environ |= {} if value is None else {name: value}
