"""Several processes on this machine, which no launcher has started: `--devices 2`, and each machine joined by hand.

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
from collections.abc import Mapping, Sequence
from functools import cached_property

from rankzero.distributed import network
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.environments.launchers import local
from rankzero.distributed.process.exit_handshake import ExitHandshake
from rankzero.distributed.process.stop_signals import SIGNALS
from rankzero.messages import Exit, print_error

GRACE_SECONDS = 10.0
"""How long processes have to leave by themselves once one has failed, or once they were told to end."""

_POLL_SECONDS = 0.05


def run_processes(command: Sequence[str], count: int, launch: Launch | None = None) -> int:
    """Runs `command` in `count` processes and waits for all of them.

    Args:
        command: What each of them runs.
        count: How many.
        launch: Which of several machines this is, where they are joined by hand.

    Returns:
        0 where all left with 0; otherwise the exit code of the one that failed first. One that was ended by a signal
        counts as 1.
    """
    launch = launch or Launch()
    installed = SIGNALS.install()
    watched = _Processes(_start(command, count, launch), first_rank=(launch.node_rank or 0) * count)
    try:
        SIGNALS.subscribe(watched.pass_on)
        return watched.wait()
    finally:
        watched.close()
        if installed:
            SIGNALS.close()


def own_command() -> list[str]:
    """Returns the command that starts this program again, with the same arguments."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None:
        return [sys.executable, *sys.argv]
    return [sys.executable, "-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]


def is_watched() -> bool:
    """Whether this process is one of those."""
    return local.MARK in os.environ


def die_with_parent() -> None:
    """Asks Linux to kill this process when the one that started it is gone, so that none is ever left behind."""
    if sys.platform != "linux":
        return
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG, prctl(2)
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.environ.get(local.MARK, "") != str(os.getppid()):  # it was gone before it could be asked
        os._exit(1)


def _start(command: Sequence[str], count: int, launch: Launch) -> list["_Process"]:
    """Starts the processes; rank zero of one machine inherits the socket, so that nobody takes the port meanwhile."""
    if (launch.num_nodes or 1) > 1:
        variables = _variables(count, launch)
        return [_Process(command, variables | _place(i, count, launch)) for i in range(count)]
    with network.listen("127.0.0.1", 0) as listening:
        variables = _variables(count, launch._replace(port=listening.getsockname()[1]))
        first = variables | _place(0, count, launch) | {local.LISTENING: str(listening.fileno())}
        processes = [_Process(command, first, listening.fileno())]
        return processes + [_Process(command, variables | _place(i, count, launch)) for i in range(1, count)]


def _variables(count: int, launch: Launch) -> dict[str, str]:
    """The variables that torchrun would set for all, and the mark that it was us."""
    nodes = launch.num_nodes or 1
    return {
        **os.environ,
        local.MARK: str(os.getpid()),
        local.EVIDENCE: launch.evidence,
        "WORLD_SIZE": str(nodes * count),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": str(launch.node_rank or 0),
        "GROUP_WORLD_SIZE": str(nodes),
        "MASTER_ADDR": launch.address,
        "MASTER_PORT": str(launch.port),
    }


def _place(local_rank: int, count: int, launch: Launch) -> dict[str, str]:
    """The variables that torchrun would set for one of them."""
    return {"RANK": str((launch.node_rank or 0) * count + local_rank), "LOCAL_RANK": str(local_rank)}


class _Process(subprocess.Popen[bytes]):
    """A process that reports when it ends on purpose."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], *inherited: int) -> None:
        self._report = ExitHandshake()
        try:
            passed = (*inherited, self._report.writing)
            super().__init__(command, env={**variables, **self._report.variables}, pass_fds=passed)
        except BaseException:
            self._report.close()
            raise

    @cached_property
    def has_reported(self) -> bool:
        """Whether this process, which has ended, chose its exit code; otherwise something else ended it."""
        return self._report.is_there()

    def close(self) -> None:
        """Closes what this process holds."""
        self._report.close()


class _Processes:
    """Processes that are watched together."""

    def __init__(self, processes: Sequence[_Process], first_rank: int) -> None:
        self.processes, self.first_rank = processes, first_rank
        self.deadline = float("inf")

    def pass_on(self, signum: signal.Signals) -> None:
        """Passes a signal on to all. They stop when they have saved, and only they know how long that takes."""
        for process in self.processes:
            process.send_signal(signum)

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

    def close(self) -> None:
        """Kills those that are left, and closes what this process holds."""
        self.kill()
        for process in self.processes:
            process.close()

    def _give_grace(self) -> None:
        self.deadline = min(self.deadline, time.monotonic() + GRACE_SECONDS)

    def _first_failure(self) -> int | None:
        for rank, process in enumerate(self.processes):
            code = process.poll()
            if code is not None and code < 0:
                name = signal.Signals(-code).name
                if name == SIGNALS.asked:  # it came before the process could listen: nothing was begun
                    return Exit.STOPPED
                return self._tell(rank, f"was ended by {name}")
            if code is not None and not process.has_reported:
                return self._tell(rank, f"ended with exit code {code} without a report")
            if code:
                return code  # it has said why
        return None

    def _tell(self, rank: int, how: str) -> int:
        print_error(f"rank {self.first_rank + rank} on {socket.gethostname()} {how}; ending the others")
        return Exit.FAILED
