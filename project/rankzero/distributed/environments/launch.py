"""Position of this process among all ranks, as its launcher's variables state it."""

import hashlib
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from typing import NamedTuple


class Launch(NamedTuple):
    """Ranks, world size, rendezvous address and origin of this process.

    Args:
        launcher: Name of the launcher, as in `launchers.LAUNCHERS`.
        evidence: The variables or flags that identify the launcher, as messages show them.
        rank: Global rank; None if the launcher assigns none, so that the rendezvous does.
        local_rank: Rank on this machine; None if the launcher does not state it.
        world_size: Number of processes on all machines.
        local_world_size: Number of processes on this machine; None if the launcher does not state it.
        num_nodes: Number of machines; None if the launcher does not state it.
        node_rank: Index of this machine; None if the launcher does not state it.
        processes_per_node: Number of processes on each machine, if the launcher states it.
        hosts: Names of the machines, if the launcher states them.
        address: Host of rank zero, where the ranks rendezvous.
        port: Port of the rendezvous.
        listening_fd: File descriptor of a socket that already listens on `port`, inherited from the parent process.
        world_id: Identifier shared by all processes of this start and by no other process.
        job_id: The scheduler's or torchrun's id of the job; unchanged after a requeue or a restart.
        restarts: How often the scheduler or torchrun has restarted this job.
        externally_created: Whether the launcher has already started one process per device.
        uses_agent_store: Whether torchrun's agent provides a store, in which the ranks find the address of rank zero.
        elastic: The setting by which torchrun may change the number of machines; None if the number is fixed.
        variables: The environment variables from which the launch was read.
    """

    launcher: str = "local"
    evidence: str = "no launcher's variables are set"
    rank: int | None = 0
    local_rank: int | None = 0
    world_size: int = 1
    local_world_size: int | None = 1
    num_nodes: int | None = 1
    node_rank: int | None = 0
    processes_per_node: tuple[int, ...] | None = None
    hosts: tuple[str, ...] = ()
    address: str = "127.0.0.1"
    port: int = 0
    listening_fd: int | None = None
    world_id: str = ""
    job_id: str | None = None
    restarts: int = 0
    externally_created: bool = False
    uses_agent_store: bool = False
    elastic: str | None = None
    variables: Mapping[str, str] = {}

    @property
    def is_single_machine(self) -> bool:
        """Whether all processes are known to run on one machine."""
        return self.num_nodes == 1 or self.local_world_size == self.world_size

    @property
    def shape(self) -> str:
        """Number of nodes and processes as text, such as `2 nodes x 4 processes`."""
        if self.num_nodes is None:
            return f"{self.world_size} process{'es' * (self.world_size > 1)}"
        nodes = f"{self.num_nodes} node{'s' * (self.num_nodes > 1)}"
        process_counts = self.processes_per_node or (self.world_size // self.num_nodes,)
        if len(set(process_counts)) > 1:
            return f"{nodes} with {', '.join(map(str, process_counts[:-1]))} and {process_counts[-1]} processes"
        return f"{nodes} x {process_counts[0]} process{'es' * (process_counts[0] > 1)}"


class RequestedWorld(NamedTuple):
    """The processes that the user requests: how many, on which devices, and how they connect.

    `gpus` is () for all, and None for the first ones. Without `start_timeout`, in seconds, all processes have 300 s to
    connect, and no limit to build data and model.
    """

    nodes: int | None = None
    devices: int | None = None
    gpus: tuple[int, ...] | None = None
    accelerator: str = "auto"
    launcher: str = "auto"
    node_rank: int | None = None
    address: str | None = None
    port: int | None = None
    interface: str | None = None
    backend: str | None = None
    start_timeout: float | None = None
    auth: str = "auto"

    @property
    def rendezvous_timeout(self) -> float:
        """Seconds to wait for all processes."""
        return 300.0 if self.start_timeout is None else self.start_timeout


class Variables:
    """Environment variables, with a record of those that have been read.

    Attributes:
        recorded: The variables that have been read, with their values.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.recorded: dict[str, str] = {}

    def __contains__(self, name: str) -> bool:
        return bool(self._environ.get(name))

    def find(self, name: str) -> str | None:
        """Returns the value of a variable; None if it is unset or empty."""
        if (value := self._environ.get(name) or None) is not None:
            self.recorded[name] = value
        return value

    def find_number(self, name: str) -> int | None:
        """Returns the integer value of a variable; None if it is unset or empty.

        Raises:
            ValueError: The value is not an integer of 0 or more.
        """
        text = self.find(name)
        if text is not None and not (text.isascii() and text.isdigit()):
            raise ValueError(f"{name}={text!r} is not a whole number >= 0")
        return None if text is None else int(text)

    def text(self, name: str) -> str:
        """Returns the value of a required variable.

        Raises:
            KeyError: The variable is unset or empty.
        """
        if (value := self.find(name)) is None:
            raise KeyError(name)
        return value

    def number(self, name: str) -> int:
        """Returns the integer value of a required variable.

        Raises:
            KeyError: The variable is unset or empty.
            ValueError: The value is not an integer of 0 or more.
        """
        if (value := self.find_number(name)) is None:
            raise KeyError(name)
        return value


class Launcher(NamedTuple):
    """Description of a launcher. Each module in `launchers` ends with one.

    Args:
        name: Value for `--launcher`.
        found: Returns whether the launcher's variables are set.
        read: Returns the `Launch`, without the fields that `detect` sets under any launcher. Raises KeyError for a
            missing variable and ValueError for an invalid one.
        command: Command that starts the script, with `{nodes}`, `{devices}` (per node) and `{processes}` (total).
        rank_variables: Variables that contain a process's rank, most specific first.
        shown_variables: Variables that an error about incomplete variables shows.
        one_per_node: Command prefix that starts one process per node, such as a torchrun; empty if unsupported.
        gathers_output: Whether the launcher forwards the output of all machines to one terminal.
    """

    name: str
    found: Callable[["Variables"], bool]
    read: Callable[["Variables", RequestedWorld], Launch]
    command: str = ""
    rank_variables: tuple[str, ...] = ()
    shown_variables: tuple[str, ...] = ()
    one_per_node: str = ""
    gathers_output: bool = False

    def command_for(self, nodes: int | str = "N", devices: int | str = "D") -> str:
        """Returns the command that starts the script on `nodes` nodes, with `devices` processes on each."""
        processes = nodes * devices if isinstance(nodes, int) and isinstance(devices, int) else "N"
        python = shlex.quote(sys.executable)  # PATH may have another one on the other hosts
        return self.command.format(nodes=nodes, devices=devices, processes=processes, python=python)


def folder_name(job_id: str | None) -> str | None:
    """Returns a job id as a valid folder name: `15[3].pbs1`, a member of a PBS array, becomes `15-3.pbs1`."""
    if job_id is None:
        return None
    return re.sub(r"[^A-Za-z0-9_.+=@-]", "", re.sub(r"[\[/\s]+", "-", job_id)).strip(".-")[:64] or None


def derived_port(key: str) -> int:
    """Returns a port derived from `key`: 20000 to 32767, below the range that Linux uses for outgoing connections."""
    return 20000 + int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") % 12768


def rendezvous_endpoint(variables: Variables, requested: RequestedWorld, host: str | None, key: str) -> tuple[str, int]:
    """Returns address and port of the rendezvous.

    The sources, in this order, are the request, MASTER_ADDR and MASTER_PORT, and `host` with a port derived from `key`.

    Raises:
        KeyError: No source specifies the address.
        ValueError: The port is not a valid port number.
    """
    address = requested.address or variables.find("MASTER_ADDR") or host
    if address is None:
        raise KeyError("MASTER_ADDR")
    port = requested.port or variables.find_number("MASTER_PORT") or derived_port(key)
    if port > 65535:
        raise ValueError(f"MASTER_PORT={port} is not a port (1 to 65535)")
    return address, port
