"""Rules about launchers: on how many machines they start a command, and how the machines find each other."""

import re
from collections.abc import Iterator
from itertools import pairwise

from rankzero.jobs.check.commands import Command
from rankzero.jobs.check.script import OUTER, Finding, Script, resolved

C10D = "--rdzv-backend=c10d --rdzv-id=JOB_ID --rdzv-endpoint=FIRST_MACHINE:PORT, without --node-rank"
"""Options of torchrun with which machines find each other."""

LOCAL_ADDRESS = r"(localhost|127\.[0-9.]+|\[?::1\]?)(:.*)?"
"""Addresses at which a machine reaches itself."""

_MACHINES = {"torchrun": "--nnodes", "accelerate": "--num-machines"}
"""Launcher on each machine -> its option for the number of machines."""

_NP = ("-np", "-n", "--np", "--n")
_OPAQUE = r"(ba|z|k)?sh|ray|dask|parallel|\S+\.sh|\$.*"  # programs that may start others


def missing_launcher(script: Script) -> Iterator[Finding]:
    """A command that starts on the first machine only."""
    launchers = {name for command in script.commands for name in command.launchers}
    programs = [command.program for command in script.commands]
    if {*OUTER, "ssh", "deepspeed"} & launchers or any(re.fullmatch(_OPAQUE, program) for program in programs):
        return
    is_spread = "scatter" in script.directives.get("place", "") or "nodes" in script.directives
    for command in script.training:
        name, machines = (*command.launchers, "one process")[0], script.machines(command) or 1
        own = machines_of(script, command) or 0
        if machines == 1 or (name == "accelerate" and (own == 0 or "deepspeed" in " ".join(command.words))):
            continue
        # Without `place`, PBS may put all chunks on one machine.
        if script.scheduler == "slurm" or is_spread or own > 1:
            unit = "nodes" if script.scheduler == "slurm" else "chunks"
            found = f"{name} starts on the first machine only, in a job of {machines} {unit}"
            yield command.line, found, "srun (Slurm), pbsdsh (PBS) or mpirun before this command"


def several_per_machine(script: Script) -> Iterator[Finding]:
    """A launcher per process, where one per machine is needed."""
    for command in script.training:
        outer, name = (*command.launchers, "", "")[:2]
        hosts, tasks = script.machines(command) or 0, script.tasks_per_machine(command) or 0
        machines, starts = machines_of(script, command), hosts * tasks * (tasks > 1)
        if outer == "mpirun":
            starts = script.count(command.option(outer, *_NP), command) or 0
        is_one = command.option("pbsdsh", "-n", "-h", "-c") is not None
        if name in _MACHINES and outer in OUTER and not is_one and machines and starts > machines:
            found = f"{outer} starts {name} {starts} times, for {machines} machine{'s' * (machines != 1)}"
            yield command.line, found, f"one {name} per machine, such as srun --ntasks-per-node=1"


def rendezvous(script: Script) -> Iterator[Finding]:
    """Machines that do not know of the others, wait for them at the wrong place, or all have the same rank."""
    for command in script.training:
        machines, nodes = machines_of(script, command), script.machines(command) or 0
        if machines is None:
            continue
        outer, name = command.launchers[0], command.launchers[-1]
        rank, is_unranked, tasks = node_rank(command), is_static(command), script.tasks_per_machine(command)
        sizes = nodes, script.count("$SLURM_NNODES", command)
        on_all = outer in OUTER and nodes > 1
        is_started = bool(script.scheduler) or outer != "torchrun"  # otherwise, PET_NNODES may be set
        endpoint = command.option("torchrun", "--rdzv-endpoint") or command.option("torchrun", "--master-addr")
        address, text = resolved(command.values, endpoint or ""), " ".join(command.words)
        found, instead = "", C10D
        if machines == 1:
            has_own_run = re.search(r"SLURM_(NODEID|PROCID)|PBS_NODENUM", text)
            if on_all and outer != "mpirun" and (tasks or 1) == 1 and not has_own_run:
                found, instead = f"{name} expects one machine: each machine trains alone", f"{_MACHINES[name]}=N"
        elif name == "accelerate":
            if is_unranked and on_all and command.option(name, "--config-file", "--machine-rank") is None:
                found, instead = "without --machine_rank, every machine has rank 0", "the rank of each machine"
        elif command.option("torchrun", "--standalone") is not None:
            found = "--standalone ignores the other machines: each of them trains alone"
        elif endpoint is None and is_started:
            found = f"without an address, each of the {machines} machines waits for the others on itself"
        elif re.fullmatch(LOCAL_ADDRESS, address):
            found = f"at {address}, each machine waits for the others on itself"
        elif is_unranked and is_started and rank is None:
            found = "without --node-rank, every machine has node rank 0"
        elif is_unranked and on_all and (rank or "").isdigit() and [*filter(node_rank, script.training)] == [command]:
            found = f"{outer} starts torchrun with node rank {rank} on every machine"
        elif outer == "srun" and tasks == 1 and nodes and machines not in sizes:
            found, instead = f"--nnodes {machines} does not match the job (nodes: {nodes})", f"--nnodes {nodes}"
        if found:
            yield command.line, found, instead


def in_sequence(script: Script) -> Iterator[Finding]:
    """Commands for several machines that run one after the other."""
    ranks = [(command, rank) for command in script.training if (rank := node_rank(command) or "").isdigit()]
    ranks = [(command, rank) for command, rank in ranks if command.launchers[0] in ("torchrun", "ssh")]
    for (command, rank), (_, other) in pairwise(ranks):
        if rank != other and not command.in_background and (machines_of(script, command) or 1) > 1:
            found = f"node rank {rank} waits for node rank {other}, whose command starts after this one has ended"
            yield command.line, found, "one command per machine, each started on its own machine"


def world_size(script: Script) -> Iterator[Finding]:
    """Fewer processes of mpirun than `WORLD_SIZE` says."""
    for command in script.training:
        given = [word.partition("=")[2] for word in command.words if word.startswith("WORLD_SIZE=")]
        size = script.count((*given, "$WORLD_SIZE")[0], command) or 0
        processes = script.count(command.option("mpirun", *_NP), command) or size
        starts_others = re.search(r"ppr:1:node|-npernode 1\b|-ppn 1\b| : ", " ".join(command.words))
        if command.launchers == ["mpirun"] and processes < size and not starts_others:
            found = f"WORLD_SIZE is {size}, but mpirun starts {processes} processes, which wait for the others"
            yield command.line, found, f"-np {size}, or WORLD_SIZE={processes}"


def machines_of(script: Script, command: Command) -> int | None:
    """Returns the number of machines in the options of torchrun or accelerate; None if it is unknown."""
    name = next((name for name in command.launchers if name in _MACHINES), "")
    number = command.option(name, _MACHINES.get(name, ""))
    if number is None and name != "torchrun":  # accelerate also reads a file of the user
        return None
    uses_variables = re.search(r"\bPET_[A-Z]", script.code)  # such as PET_NNODES, for the options of torchrun
    return None if uses_variables or command.is_open(name) else script.count(number or "1", command)


def is_static(command: Command) -> bool:
    """Whether the ranks of the machines come from the command line."""
    return {command.option(name, "--rdzv-backend") for name in command.launchers} <= {None, "static"}


def node_rank(command: Command) -> str | None:
    """Returns the node rank of a torchrun; None without one."""
    rank = command.option("torchrun", "--node-rank")
    return None if rank is None else resolved(command.values, rank)


RULES = (missing_launcher, several_per_machine, rendezvous, in_sequence, world_size)
