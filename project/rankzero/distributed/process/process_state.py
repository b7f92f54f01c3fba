"""Whether a process of this host lives, since when, and where its id counts. Imports no torch."""

import errno
import os
from pathlib import Path


def process_state(pid: int) -> tuple[str, str] | None:
    """State and time of birth of a process of this host, see proc(5); None if it does not exist."""
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
    """What tells equal process ids of two containers apart; empty where the system has no such thing."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
