"""State, start time and id namespace of processes on this host. Does not import torch."""

import errno
import os
from pathlib import Path


def process_state(pid: int) -> tuple[str, str] | None:
    """Returns state and start time of a process on this host; None if the process does not exist.

    The start time is in clock ticks since boot, as text, see proc(5). Without /proc, both texts are empty.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
        try:  # a system without /proc
            os.kill(pid, 0)
        except OSError as error:
            return ("", "") if error.errno == errno.EPERM else None
        return "", ""
    return fields[0], fields[19]


def process_namespace() -> str:
    """Returns the PID namespace, which distinguishes equal process ids of two containers; empty if unsupported."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
