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
"""How long processes have to leave by themselves once one has failed, or once they were told to end."""

_POLL_SECONDS = 0.05


def run_processes(command: Sequence[str], count: int) -> int:
    """Runs `command` in `count` processes, ranks 0 to `count` - 1, and waits for all of them.

    Returns:
        0 where all left with 0; otherwise the exit code of the one that failed first. One that was ended by a signal
        counts as 1.
    """
    port = free_port()
    watched = _Processes([subprocess.Popen(command, env=_variables(rank, count, port)) for rank in range(count)])
    before = {
        signum: signal.signal(signum, watched.pass_on) for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    }
    # A terminal sends Ctrl-C to the whole foreground group, so that every process already has it.
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return watched.wait()
    finally:
        watched.kill()
        for signum, handler in before.items():
            signal.signal(signum, handler)


def die_with_parent() -> None:
    """Asks Linux to kill this process when the one that started it is gone, so that none is ever left behind."""
    if sys.platform != "linux":
        return
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG, prctl(2)
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.environ.get(LOCAL_MARK, "") != str(os.getppid()):  # it was gone before it could be asked
        os._exit(1)


def free_port() -> int:
    """A port that nothing on this machine listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _variables(rank: int, count: int, port: int) -> dict[str, str]:
    """The variables that torchrun would set, and the mark that it was us."""
    variables = {
        **os.environ,
        LOCAL_MARK: str(os.getpid()),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if sys.platform == "linux":
        variables.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine: nothing of gloo's listens beyond it
    return variables


class _Processes:
    """Processes that are watched together."""

    def __init__(self, processes: Sequence["subprocess.Popen[bytes]"]) -> None:
        self.processes = processes
        self.deadline = float("inf")

    def pass_on(self, signum: int, frame: FrameType | None) -> None:
        """Passes a signal on to all; SIGTERM leaves them a while to end."""
        for process in self.processes:
            process.send_signal(signum)
        if signum == signal.SIGTERM:
            self._give_grace()

    def wait(self) -> int:
        """Waits for all, but not long once one has failed; returns the exit code of that one, or 0."""
        failed: int | None = None
        while any(process.poll() is None for process in self.processes):
            if failed is None and (failed := self._first_failure()) is not None:
                self._give_grace()
            if time.monotonic() > self.deadline:
                self.kill()
            time.sleep(_POLL_SECONDS)
        return (self._first_failure() or 0) if failed is None else failed

    def kill(self) -> None:
        """Kills those that are left."""
        for process in self.processes:
            process.kill()
            process.wait()

    def _give_grace(self) -> None:
        self.deadline = min(self.deadline, time.monotonic() + GRACE_SECONDS)

    def _first_failure(self) -> int | None:
        for rank, process in enumerate(self.processes):
            code = process.poll()
            if code is not None and code < 0:
                name = signal.Signals(-code).name
                print(f"rankzero: rank {rank} was ended by {name}; ending the others", file=sys.stderr, flush=True)
                return 1
            if code:
                return code
        return None
