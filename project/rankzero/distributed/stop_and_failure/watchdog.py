"""Kills a rank that is stopped (SIGSTOP) while its machine keeps running. Does not import torch.

All other ranks would wait for a stopped rank. A stopped process runs none of its threads and reads no messages, but
SIGKILL still terminates it. So the watchdog is a separate process, one per machine. It kills no rank if all processes
are stopped together (Ctrl-Z, `scontrol suspend`, a closed laptop lid), since it is then stopped too. It ignores ranks
that a debugger has stopped, which are in a different process state.

python watchdog.py HOST RANK:PID...
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

STOPPED_SECONDS = 8.0
"""How long a rank may be stopped before it is killed."""

LOOK_SECONDS = 1.0


def start_watchdog(host: str, ranks: Sequence[tuple[int, int]]) -> "subprocess.Popen[bytes] | None":
    """Starts the watchdog of this machine; returns None on a system without `/proc`.

    Args:
        host: The machine's name.
        ranks: Rank and process id of each process on the machine.
    """
    if not Path("/proc/self/stat").exists():
        return None
    words = [f"{rank}:{pid}" for rank, pid in ranks]
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, host, *words], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )


def watch(host: str, ranks: dict[int, int]) -> None:
    """Watches the ranks until all of them have exited.

    Args:
        host: The machine's name.
        ranks: Process id of each rank on the machine; emptied as the ranks exit.
    """
    born = {rank: _stat(pid)[1] for rank, pid in ranks.items()}
    since: dict[int, float] = {}
    looked = time.monotonic()
    while ranks:
        time.sleep(LOOK_SECONDS)
        now = time.monotonic()
        if now - looked > STOPPED_SECONDS / 2:
            since.clear()  # the watchdog was stopped too
        looked = now
        for rank, pid in list(ranks.items()):
            state, birth = _stat(pid)
            if birth != born[rank] or state in ("", "Z", "X"):
                del ranks[rank]
            elif state != "T":
                since.pop(rank, None)
            elif now - since.setdefault(rank, now) >= STOPPED_SECONDS:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                what = f"was stopped (SIGSTOP) for {STOPPED_SECONDS:g} s while its machine went on; it is ended"
                with contextlib.suppress(OSError, ValueError):
                    print(f"rankzero: rank {rank} on {host} {what}", file=sys.stderr, flush=True)


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
    watch(sys.argv[1], {int(rank): int(pid) for rank, _, pid in (word.partition(":") for word in sys.argv[2:])})
