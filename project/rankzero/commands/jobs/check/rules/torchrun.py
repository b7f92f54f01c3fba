"""Rules about torchrun and torch.distributed.launch: how the machines find each other."""

import re
from collections.abc import Iterator

from rankzero.commands.jobs.check.command import Command
from rankzero.commands.jobs.check.finding import Finding
from rankzero.commands.jobs.check.machines import C10D, LOCAL_ADDRESS, processes_per_chunk, uses_machines
from rankzero.commands.jobs.check.user_script import UserScript

UNKNOWN = "?"
"""A node rank that the script does not state."""

_OUTER = (["srun"], ["pbsdsh"], ["mpirun"])
"""Launchers that start a command on all machines."""


def rendezvous(script: UserScript) -> Iterator[Finding]:
    """Machines that wait for each other at the wrong place, or that all have the same node rank."""
    for command in _torchruns(script):
        nodes = command.option("torchrun", "--nnodes")
        if nodes is None or script.count(nodes.text, command) == 1:
            continue
        endpoint = command.option("torchrun", "--rdzv-endpoint") or command.option("torchrun", "--master-addr")
        address = script.resolved(endpoint.text, command) if endpoint else ""
        if command.option("torchrun", "--standalone"):
            found = "--standalone ignores the other machines: each of them trains alone"
            yield Finding(command.line, found, C10D)
        elif endpoint is None and not command.is_open("torchrun"):
            found = f"without an address, each of the {nodes.text} machines waits for the others on itself"
            yield Finding(command.line, found, C10D)
        elif re.fullmatch(LOCAL_ADDRESS, address):
            found = f"at {address}, each machine waits for the others on itself"
            yield Finding(command.line, found, "the name of the first machine")
        elif endpoint and _is_static(command) and _node_rank(script, command) is None:
            yield Finding(command.line, "without --node-rank, every machine has node rank 0", C10D)


def alone(script: UserScript) -> Iterator[Finding]:
    """A torchrun on each machine that does not know of the others."""
    for command in _torchruns(script):
        if command.launchers[:1] not in _OUTER or not uses_machines(script, command) or command.is_open("torchrun"):
            continue
        nodes = command.option("torchrun", "--nnodes")
        if nodes is None or script.count(nodes.text, command) == 1:
            found = "torchrun without --nnodes: each machine trains alone"
            yield Finding(command.line, found, f"torchrun --nnodes=N {C10D}")


def node_ranks_in_sequence(script: UserScript) -> Iterator[Finding]:
    """Commands for several machines that run one after the other."""
    ranks = []
    for command in _torchruns(script):
        rank = _node_rank(script, command)
        if command.launchers == ["torchrun"] and rank and rank.isdigit():
            ranks.append((command, rank))
    for command, number in ranks:
        others = [other for _, other in ranks if other != number]
        if others and not command.position.in_background:
            found = (
                f"node rank {number} waits for node rank {others[-1]}, whose command starts after this one has ended"
            )
            yield Finding(command.line, found, "one command per machine, each started on its own machine")
            return


def machines_in_sequence(script: UserScript) -> Iterator[Finding]:
    """A loop over machines that waits for each of them."""
    for command in _torchruns(script):
        nodes = command.option("torchrun", "--nnodes")
        loop = command.position.loop
        ends = any(other.program == "wait" and other.position.loop == loop for other in script.after(command))
        waits = loop and (not command.position.in_background or ends)
        if not waits or nodes is None or command.launchers[0] == "torchrun":
            continue
        host = command.option("srun", "-w", "--nodelist", "--relative", "-r")
        is_on_one = command.launchers[0] == "ssh" or (host is not None and "$" in host.text)
        if is_on_one and script.count(nodes.text, command) != 1:
            found = "the loop starts the machines one after the other, and the first one waits for the others"
            yield Finding(command.line, found, "& after this command, and wait after the loop")


def fixed_node_rank(script: UserScript) -> Iterator[Finding]:
    """One command with a fixed node rank, which a launcher starts on all machines."""
    for command in _torchruns(script):
        rank = _node_rank(script, command)
        if rank is None or not rank.isdigit() or not _is_static(command) or not uses_machines(script, command):
            continue
        is_only = not any(other is not command and _node_rank(script, other) for other in _torchruns(script))
        if is_only and command.launchers[:1] in _OUTER:
            found = f"{command.launchers[0]} starts torchrun with node rank {rank} on every machine"
            yield Finding(command.line, found, C10D)


def several_per_machine(script: UserScript) -> Iterator[Finding]:
    """A torchrun per process of pbsdsh or mpirun, where one per machine is needed."""
    per_chunk = processes_per_chunk(script) if script.scheduler == "pbs" else None
    for command in _torchruns(script):
        starts_all = command.option("pbsdsh", "-n", "-h", "-c") is None
        if command.launchers[:2] == ["pbsdsh", "torchrun"] and starts_all and per_chunk and per_chunk > 1:
            found = f"pbsdsh starts torchrun {per_chunk} times on each machine (mpiprocs={per_chunk})"
            yield Finding(command.line, found, "mpiprocs=1 in the select line")
        if command.launchers[:2] == ["mpirun", "torchrun"]:
            count = command.option("mpirun", "-np", "-n", "--np", "--n")
            processes = script.count(count.text, command) if count else None
            nodes = command.option("torchrun", "--nnodes")
            machines = script.count(nodes.text, command) if nodes else 1
            if processes and machines and processes > machines:
                found = f"mpirun starts torchrun {processes} times, for {machines} machine{'s' * (machines != 1)}"
                yield Finding(command.line, found, f"mpirun -np {machines} --map-by ppr:1:node ...")


def _torchruns(script: UserScript) -> list[Command]:
    """Returns the training commands with torchrun; none if variables such as PET_NNODES hold its options."""
    if re.search(r"\bPET_[A-Z]", script.code):
        return []
    return [command for command in script.training if "torchrun" in command.launchers]


def _node_rank(script: UserScript, command: Command) -> str | None:
    """Returns the node rank of a command; None without one, `UNKNOWN` if a variable may contain it."""
    rank = command.option("torchrun", "--node-rank")
    if rank is None:
        return UNKNOWN if command.is_open("torchrun") else None
    return script.resolved(rank.text, command)


def _is_static(command: Command) -> bool:
    """Whether the ranks of the machines come from the command line."""
    backend = command.option("torchrun", "--rdzv-backend")
    return (backend is None and not command.is_open("torchrun")) or (backend is not None and backend.text == "static")


RULES = (rendezvous, alone, node_ranks_in_sequence, machines_in_sequence, fixed_node_rank, several_per_machine)
