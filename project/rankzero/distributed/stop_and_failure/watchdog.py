"""Kills a rank that is stopped (SIGSTOP) while its machine keeps running.

All other ranks would wait for a stopped rank. A stopped process runs none of its threads and reads no messages, but
SIGKILL still terminates it. So the watchdog is a separate process, one per machine. It kills no rank if all processes
are stopped together (Ctrl-Z, `scontrol suspend`, a closed laptop lid), since it is then stopped too. It ignores ranks
that a debugger has stopped, which are in a different process state.

python watchdog.py HOST STOPPED_SECONDS POLL_SECONDS RANK:PID...
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path


def start_watchdog(
    host: str, ranks: Mapping[int, int], stopped_seconds: float, poll_seconds: float
) -> "subprocess.Popen[bytes] | None":
    """Starts the watchdog of the ranks on this machine, given their process ids; None on a system without `/proc`.

    A rank may be stopped for `stopped_seconds` before it is killed.
    """
    if not Path("/proc/self/stat").exists():
        return None
    arguments = [host, str(stopped_seconds), str(poll_seconds), *(f"{rank}:{pid}" for rank, pid in ranks.items())]
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )


def monitor_ranks(host: str, ranks: dict[int, int], stopped_seconds: float, poll_seconds: float) -> None:
    """Watches the ranks until all of them have exited."""
    start_times = {rank: _stat(pid)[1] for rank, pid in ranks.items()}
    stopped_since: dict[int, float] = {}
    last_poll = time.monotonic()
    while ranks:
        time.sleep(poll_seconds)
        now = time.monotonic()
        if now - last_poll > stopped_seconds / 2:
            stopped_since.clear()  # the watchdog was stopped too
        last_poll = now
        for rank, pid in list(ranks.items()):
            state, start_time = _stat(pid)
            if start_time != start_times[rank] or state in ("", "Z", "X"):
                del ranks[rank]
            elif state != "T":
                stopped_since.pop(rank, None)
            elif now - stopped_since.setdefault(rank, now) >= stopped_seconds:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                description = f"was suspended (SIGSTOP) for {stopped_seconds:g} s; killing it"
                with contextlib.suppress(OSError, ValueError):
                    print(f"rankzero: rank {rank} on {host} {description}", file=sys.stderr, flush=True)


def _stat(pid: int) -> tuple[str, str]:
    """Returns the state and start time of a process, see proc(5); empty strings if the process does not exist."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


if __name__ == "__main__":
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    _, host, stopped, poll, *ranks = sys.argv
    pids = {int(rank): int(pid) for rank, _, pid in (argument.partition(":") for argument in ranks)}
    monitor_ranks(host, pids, float(stopped), float(poll))
