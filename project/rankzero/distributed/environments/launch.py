"""Where this process stands among the others, as its launcher's variables tell. Imports no torch."""

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple


class Launch(NamedTuple):
    """Where this process stands.

    Args:
        launcher: Name of the launcher, as in `launchers.LAUNCHERS`.
        evidence: The variables that say so, for a person to read.
        rank: This process among all; None where the launcher gives none, and the roll call hands it out.
        local_rank: This process among those of its machine; None where the launcher does not say.
        world_size: Processes in all.
        local_world_size: Processes on this machine; None where the launcher does not say.
        num_nodes: Machines; None where the launcher does not say.
        node_rank: This machine among all; None where the launcher does not say.
        processes_a_node: Processes on each machine, where the launcher says.
        hosts: The machines' names, where the launcher says.
        address: The host that the others meet at: rank zero's.
        port: The port that they meet at.
        listening: A socket that already listens on that port, inherited from the process that started this one.
        world_id: What the processes of this world share, and those of no other.
        job_id: What the scheduler or torchrun calls the job; the same after a requeue or a restart.
        restarts: How often the scheduler or torchrun has started this job again.
        externally_created: True where each device has its process already.
        uses_agent_store: True where torchrun has already brought the processes together.
        elastic: Where torchrun may change the number of machines: what says so.
        rank_order: What ranks are handed out by, where the launcher gives none.
        variables: What all this was read from.
    """

    launcher: str = "local"
    evidence: str = "no launcher's variables are set"
    rank: int | None = 0
    local_rank: int | None = 0
    world_size: int = 1
    local_world_size: int | None = 1
    num_nodes: int | None = 1
    node_rank: int | None = 0
    processes_a_node: tuple[int, ...] | None = None
    hosts: tuple[str, ...] = ()
    address: str = "127.0.0.1"
    port: int = 0
    listening: int | None = None
    world_id: str = ""
    job_id: str | None = None
    restarts: int = 0
    externally_created: bool = False
    uses_agent_store: bool = False
    elastic: str | None = None
    rank_order: int = 0
    variables: Mapping[str, str] = {}

    @property
    def one_machine(self) -> bool:
        """Whether all processes are known to be on one machine."""
        return self.num_nodes == 1 or self.local_world_size == self.world_size

    @property
    def shape(self) -> str:
        """The world in words, such as `2 nodes x 4 processes`."""
        if self.num_nodes is None:
            return f"{self.world_size} process{'es' * (self.world_size > 1)}"
        nodes = f"{self.num_nodes} node{'s' * (self.num_nodes > 1)}"
        each = self.processes_a_node or (self.world_size // self.num_nodes,)
        if len(set(each)) > 1:
            return f"{nodes} with {', '.join(map(str, each[:-1]))} and {each[-1]} processes"
        return f"{nodes} x {each[0]} process{'es' * (each[0] > 1)}"


class Allocation(NamedTuple):
    """A scheduler's job in which no launcher has started anything yet.

    Args:
        evidence: The variables that say so.
        nodes: Machines.
        tasks: Processes that were meant.
    """

    evidence: str
    nodes: int
    tasks: int


class RequestedWorld(NamedTuple):
    """The processes that a person asks for: how many, on what, and how they find each other.

    Args:
        nodes: Machines (`--nodes`); None leaves it to the launcher.
        devices: Processes on each machine (`--devices`); None leaves it to the launcher, or to the number of GPUs.
        gpus: Indices of the GPUs to use on each machine, one process each; None for the first ones.
        accelerator: `auto`, `cpu`, `gpu`, `cuda` or `mps`.
        launcher: `auto`, or the launcher whose variables count.
        node_rank: This machine among all, for machines that no launcher joins.
        address: Host of rank 0.
        port: Port on that host.
        interface: Network interface to use.
        backend: `nccl` or `gloo`; None for the one that fits the devices.
        start_timeout: Seconds to wait for all processes.
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
    start_timeout: float = 300.0


class Variables:
    """Environment variables, and which of them have been read."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.read: dict[str, str] = {}

    def __contains__(self, name: str) -> bool:
        return bool(self._environ.get(name))

    def find(self, name: str) -> str | None:
        """The value of a variable, or None; an empty one counts as unset."""
        value = self._environ.get(name) or None
        if value is not None:
            self.read[name] = value
        return value

    def find_number(self, name: str) -> int | None:
        """The value of a variable that is a whole number, or None where it is not set.

        Raises:
            ValueError: It is no whole number of 0 or more.
        """
        text = self.find(name)
        if text is not None and not (text.isascii() and text.isdigit()):
            raise ValueError(f"{name}={text!r} is not a whole number of 0 or more")
        return None if text is None else int(text)

    def text(self, name: str) -> str:
        """The value of a variable.

        Raises:
            KeyError: It is not set.
        """
        value = self.find(name)
        if value is None:
            raise KeyError(name)
        return value

    def number(self, name: str) -> int:
        """The value of a variable that is a whole number.

        Raises:
            KeyError: It is not set.
            ValueError: It is no whole number of 0 or more.
        """
        value = self.find_number(name)
        if value is None:
            raise KeyError(name)
        return value


class Launcher(NamedTuple):
    """What the package has to know of a launcher. Each module of `launchers` ends with one.

    Args:
        name: As in `--launcher NAME`.
        found: Whether its variables are set.
        read: Makes a `Launch` of its variables. It raises KeyError for one that is missing, ValueError for a wrong one.
        line: How it starts the script: a template with `{nodes}`, `{devices}` (per node) and `{processes}` (in all).
        rank_variables: Variables that tell a process's rank, the most specific first.
        shown_variables: Variables that a message about incomplete variables shows.
        one_per_node: How it starts one process per node, which may be a torchrun; empty if it cannot.
        gathers_output: Whether it brings the output of all machines to one terminal.
    """

    name: str
    found: Callable[["Variables"], bool]
    read: Callable[["Variables", RequestedWorld], Launch]
    line: str = ""
    rank_variables: tuple[str, ...] = ()
    shown_variables: tuple[str, ...] = ()
    one_per_node: str = ""
    gathers_output: bool = False

    def line_for(self, nodes: int | str = "N", devices: int | str = "N") -> str:
        """How it starts the script on so many nodes, with so many processes on each."""
        processes = nodes * devices if isinstance(nodes, int) and isinstance(devices, int) else "N"
        return self.line.format(nodes=nodes, devices=devices, processes=processes)


def folder_name(job: str | None) -> str | None:
    """A job's id as a run's folder can be called by it: `15[3].pbs1`, a member of a PBS array, is 15-3.pbs1."""
    if job is None:
        return None
    return re.sub(r"[^A-Za-z0-9_.+=@-]", "", re.sub(r"[\[/\s]+", "-", job)).strip(".-")[:64] or None


def derived_port(key: str) -> int:
    """The port for a world of this key: 20000 to 32767, below what Linux gives to outgoing connections."""
    return 20000 + int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") % 12768


def meeting_point(variables: Variables, asked: RequestedWorld, host: str | None, key: str) -> tuple[str, int]:
    """Where the processes meet: what the person says, else the launcher's first host and a port derived from `key`.

    Raises:
        KeyError: Nobody says where.
        ValueError: `MASTER_PORT` is no port.
    """
    address = asked.address or variables.find("MASTER_ADDR") or host
    if address is None:
        raise KeyError("MASTER_ADDR")
    port = asked.port or variables.find_number("MASTER_PORT") or derived_port(key)
    if port > 65535:
        raise ValueError(f"MASTER_PORT={port} is not a port (1 to 65535)")
    return address, port
