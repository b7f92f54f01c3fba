"""Several processes on this machine without a launcher: `--devices 2`.

The process that the person started only watches: it starts one process a device, passes signals on, and ends all of
them as soon as one fails. It imports no torch, so it is there at once and stays small.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from project.environments.detect import LOCAL_MARK

GRACE_SECONDS = 10.0
"""How long the others have to leave by themselves once one process has failed."""

_POLL_SECONDS = 0.05


def run_processes(command: Sequence[str], count: int) -> int:
    """Runs `command` in `count` processes, ranks 0 to `count` - 1, and waits for all of them.

    Returns:
        0 where all left with 0; otherwise the exit code of the one that failed first. A signal that ended it counts
        as 1, as a failure without a word.
    """
    port = _free_port()
    processes = [subprocess.Popen(command, env=_variables(rank, count, port)) for rank in range(count)]

    def pass_on(signum: int, frame: FrameType | None) -> None:
        for process in processes:
            process.send_signal(signum)

    before = {signum: signal.signal(signum, pass_on) for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)}
    # A terminal sends Ctrl-C to the whole foreground group, so that every process already has it.
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return _wait(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for signum, handler in before.items():
            signal.signal(signum, handler)


def die_with_parent() -> None:
    """Asks Linux to kill this process when the one that started it is gone, so that none is ever left behind."""
    if sys.platform != "linux":
        return
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG, prctl(2)
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _variables(rank: int, count: int, port: int) -> dict[str, str]:
    """The variables that torchrun would set, and the mark that it was us."""
    return {
        **os.environ,
        LOCAL_MARK: "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else ""),
    }


def _wait(processes: Sequence["subprocess.Popen[bytes]"]) -> int:
    failed: int | None = None
    deadline = float("inf")
    while any(process.poll() is None for process in processes):
        if failed is None and (failed := _first_failure(processes)) is not None:
            deadline = time.monotonic() + GRACE_SECONDS
        if time.monotonic() > deadline:
            for process in processes:
                process.kill()
        time.sleep(_POLL_SECONDS)
    return _first_failure(processes) or 0 if failed is None else failed


def _first_failure(processes: Sequence["subprocess.Popen[bytes]"]) -> int | None:
    for rank, process in enumerate(processes):
        code = process.poll()
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            print(f"rankzero: rank {rank} was ended by {name}; ending the others", file=sys.stderr, flush=True)
            return 1
        if code:
            return code
    return None
