"""State, start time and id namespace of processes on this host. Does not import torch."""

from pathlib import Path

import psutil


def process_state(pid: int) -> tuple[str, str] | None:
    """Returns state and start time of a process on this host; None if the process does not exist.

    The start time is in clock ticks since boot, as text, see proc(5). Without /proc, both texts are empty.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
        return ("", "") if psutil.pid_exists(pid) else None  # a system without /proc
    return fields[0], fields[19]


def process_namespace() -> str:
    """Returns the PID namespace, which distinguishes equal process ids of two containers; empty if unsupported."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
