"""Starts local processes without a launcher: for `--devices 2`, or on each of several machines joined by hand.

The process that the user started only supervises. It starts one process per device, forwards signals, and kills the
other processes if one fails. It does not import torch, so it starts quickly and needs little memory.
"""

import ctypes
import json
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from rankzero.distributed.connections.key import pass_key
from rankzero.distributed.coordination import network
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.environments.launchers import local
from rankzero.distributed.process.exit_reports import REPORT_FD
from rankzero.distributed.process.stop_signals import SIGNALS
from rankzero.distributed.timers import TIMERS
from rankzero.messages import Exit, Stopped, print_error

START_FOLDER = Path.cwd()
"""Folder in which this program was started, if it imports `rankzero` before it changes the folder."""


def run_processes(command: Sequence[str], count: int, launch: Launch | None = None) -> int:
    """Runs `command` in `count` processes and waits for all of them.

    Returns:
        0 if all processes exited with 0; otherwise the exit code of the first failure. A process that was killed by a
        signal, or exited without a report, counts as 1. A stop signal that arrives too early to be handled counts as
        `Stopped.exit_code`.
    """
    launch = launch or Launch()
    installed = SIGNALS.install()
    processes = _Processes(_start(command, count, launch), first_rank=(launch.node_rank or 0) * count)
    try:
        SIGNALS.subscribe(processes.forward)
        return processes.wait()
    finally:
        processes.close()
        if installed:
            SIGNALS.close()


def own_command() -> list[str]:
    """Returns the command that starts this program again, with the same arguments, in its first folder.

    A program of Hydra uses the same folder of Hydra again.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = sys.argv[:1] if spec is None else ["-m", spec.name.removesuffix(".__main__")]
    overrides, config = [], _hydra_config()
    if config and config.mode.name == "MULTIRUN":  # the processes run all jobs of the sweep
        overrides = [f"hydra.sweep.dir={json.dumps(str(Path(config.runtime.cwd, config.sweep.dir)))}"]
    elif config:
        overrides = [f"hydra.run.dir={json.dumps(config.runtime.output_dir)}", "hydra.output_subdir=null"]
    return [sys.executable, *program, *sys.argv[1:], *overrides]


def _hydra_config() -> Any:
    """Returns Hydra's configuration of its job in this process; None without Hydra."""
    hydra = sys.modules.get("hydra.core.hydra_config")
    return hydra.HydraConfig.get() if hydra and hydra.HydraConfig.initialized() else None


def is_local_process() -> bool:
    """Returns whether Rankzero started this process as a local process."""
    return local.SUPERVISOR_PID in os.environ


def die_with_parent() -> None:
    """Makes Linux kill this process when its parent process exits, so that no local process outlives it."""
    if sys.platform != "linux":
        return
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG, prctl(2)
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.environ.get(local.SUPERVISOR_PID, "") != str(os.getppid()):  # the parent exited before the prctl call
        os._exit(1)


def _start(command: Sequence[str], count: int, launch: Launch) -> list["_Process"]:
    """Starts the processes.

    On a single machine, they inherit a key that no other process knows, and rank zero inherits a socket that already
    listens on the port.
    """
    if (launch.num_nodes or 1) > 1:
        return [_Process(command, variables) for variables in _variables(count, launch)]
    secret = secrets.token_bytes(32)
    with network.listen("127.0.0.1", 0) as listener:
        first, *others = _variables(count, launch._replace(port=listener.getsockname()[1]))
        first[local.LISTENING_FD] = str(listener.fileno())
        processes = [_Process(command, first, listener.fileno(), secret=secret)]
        return processes + [_Process(command, variables, secret=secret) for variables in others]


def _variables(count: int, launch: Launch) -> list[dict[str, str]]:
    """Returns the variables that torchrun would set for each process, and the marks of Rankzero's local processes."""
    nodes, first_rank = launch.num_nodes or 1, (launch.node_rank or 0) * count
    common = {
        **os.environ,
        local.SUPERVISOR_PID: str(os.getpid()),
        local.EVIDENCE: launch.evidence,
        "WORLD_SIZE": str(nodes * count),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": str(launch.node_rank or 0),
        "GROUP_WORLD_SIZE": str(nodes),
        "MASTER_ADDR": launch.address,
        "MASTER_PORT": str(launch.port),
    }
    return [common | {"RANK": str(first_rank + rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


class _Process(subprocess.Popen[bytes]):
    """A local process that reports an intended exit through a pipe."""

    def __init__(
        self, command: Sequence[str], variables: Mapping[str, str], *inherited_fds: int, secret: bytes = b""
    ) -> None:
        key_fd, key_variables = pass_key(secret)
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        self.report = os.fdopen(read_end, "rb", buffering=0)
        try:
            environment = {**variables, REPORT_FD: str(write_end), **key_variables}
            hydra = _hydra_config()
            folder = hydra.runtime.cwd if hydra else START_FOLDER  # Hydra may change the folder and import this later
            # Inherited, so that Ctrl-C does not end the process while Python starts; `join_ranks` ends the block.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            super().__init__(command, env=environment, pass_fds=(*inherited_fds, write_end, key_fd), cwd=folder)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        finally:
            os.close(key_fd)
            os.close(write_end)

    @cached_property
    def has_reported(self) -> bool:
        """Whether this process chose its exit code. To be read only after it has exited."""
        return self.report.read(1) == b"."


class _Processes:
    """The local processes that this process supervises."""

    def __init__(self, processes: Sequence[_Process], first_rank: int) -> None:
        self.processes, self.first_rank = processes, first_rank

    def forward(self, signum: signal.Signals) -> None:
        """Forwards a signal to all processes, without a deadline: the time that a save takes is unknown here."""
        for process in self.processes:
            process.send_signal(signum)

    def wait(self) -> int:
        """Waits for all processes, at most `TIMERS.grace` after a failure; returns the failure's exit code, or 0."""
        exit_code, deadline = None, math.inf
        while any(process.poll() is None for process in self.processes):
            if exit_code is None and (exit_code := self._first_failure()) is not None:
                deadline = time.monotonic() + TIMERS.grace
            if time.monotonic() > deadline:
                self.kill()
            time.sleep(TIMERS.poll)
        return (self._first_failure() or 0) if exit_code is None else exit_code

    def kill(self) -> None:
        """Kills the processes that are still running."""
        for process in self.processes:
            process.kill()
            process.wait()

    def close(self) -> None:
        """Kills the processes that are still running, and closes the pipes of all."""
        self.kill()
        for process in self.processes:
            process.report.close()

    def _first_failure(self) -> int | None:
        for rank, process in enumerate(self.processes):
            code = process.poll()
            if code is not None and code < 0:
                name = signal.Signals(-code).name
                if name == SIGNALS.received:  # it arrived before the handlers were installed, so no work had begun
                    print_error(f"{name}: stopped while the processes were starting; nothing was started")
                    return Stopped.exit_code
                reason = " (for example, gloo aborts if the ranks call different collectives)" * (name == "SIGABRT")
                return self._report_failure(rank, f"was killed by {name}{reason}")
            if code is not None and not process.has_reported:
                return self._report_failure(rank, f"exited with code {code} without an exit report")
            if code:
                return code  # the process has printed the reason
        return None

    def _report_failure(self, rank: int, description: str) -> int:
        print_error(
            f"rank {self.first_rank + rank} on {socket.gethostname()} {description}; stopping the other processes"
        )
        return Exit.FAILED
