"""Rules about torchrun and torch.distributed.launch: how the machines find each other."""

import re
from collections.abc import Iterator

from rankzero.commands.jobs.check.command import Command
from rankzero.commands.jobs.check.finding import RISKY, WRONG, Finding
from rankzero.commands.jobs.check.user_script import UserScript

_C10D = "--rdzv-backend=c10d --rdzv-id=JOB_ID --rdzv-endpoint=FIRST_MACHINE:PORT, without --node-rank"
LOCAL_ADDRESS = r"(localhost|127\.[0-9.]+|\[?::1\]?)(:[0-9]*)?"
"""Addresses at which a machine reaches itself."""


def rendezvous(script: UserScript) -> Iterator[Finding]:
    """Machines that wait for each other at the wrong place, or that all have the same node rank."""
    for command in script.training:
        if "torchrun" not in command.launchers:
            continue
        nodes = command.option("torchrun", "--nnodes")
        if nodes is None or script.resolved(nodes.text, command) == "1":
            continue
        endpoint = command.option("torchrun", "--rdzv-endpoint") or command.option("torchrun", "--master-addr")
        if command.option("torchrun", "--standalone"):
            found = "--standalone ignores the other machines: each of them trains alone"
            yield Finding(command.line, WRONG, found, _C10D)
        elif endpoint is None:
            found = f"without an address, each of the {nodes.text} machines waits for the others on itself"
            yield Finding(command.line, WRONG, found, _C10D)
        elif re.fullmatch(LOCAL_ADDRESS, script.resolved(endpoint.text, command)):
            found = f"at {endpoint.text}, each machine waits for the others on itself"
            yield Finding(command.line, WRONG, found, "the name of the first machine")
        elif _is_static(command) and command.option("torchrun", "--node-rank") is None:
            yield Finding(command.line, WRONG, "without --node-rank, every machine has node rank 0", _C10D)


def deprecated_launcher(script: UserScript) -> Iterator[Finding]:
    """`torch.distributed.launch`."""
    for command in script.training:
        if any(word.text == "torch.distributed.launch" for word in command.words):
            found = "torch.distributed.launch is deprecated, and adds --local-rank to the arguments of the script"
            instead = re.sub(
                r"\S*python[0-9.]*\s+(-u\s+)?-m\s+torch\.distributed\.launch(\s+--use[_-]env)?",
                "torchrun",
                command.text,
            )
            if any(word.text in ("--use_env", "--use-env") for word in command.words):
                found = "torch.distributed.launch is deprecated"
            yield Finding(command.line, RISKY, found, instead)


def node_ranks_in_sequence(script: UserScript) -> Iterator[Finding]:
    """Commands for several machines that run one after the other, on one machine."""
    ranks = []
    for command in script.training:
        rank = command.option("torchrun", "--node-rank") if command.launchers == ["torchrun"] else None
        if rank and rank.text.isdigit():
            ranks.append((command, rank.text))
    for command, number in ranks:
        others = [other for _, other in ranks if other != number]
        if others and not command.in_background:
            found = (
                f"node rank {number} waits for node rank {others[-1]}, whose command starts after this one has ended"
            )
            yield Finding(command.line, WRONG, found, "one command per machine, each started on its own machine")
            return


def fixed_node_rank(script: UserScript) -> Iterator[Finding]:
    """One command with a fixed node rank, which a launcher starts on all machines."""
    for command in script.training:
        rank = command.option("torchrun", "--node-rank")
        outer = command.launchers[:1]
        if rank is None or not rank.text.isdigit() or not _is_static(command):
            continue
        is_only = not any(other is not command and other.option("torchrun", "--node-rank") for other in script.training)
        if is_only and outer in (["srun"], ["pbsdsh"], ["mpirun"]):
            found = f"{outer[0]} starts torchrun with node rank {rank.text} on every machine"
            yield Finding(command.line, WRONG, found, _C10D)


def _is_static(command: Command) -> bool:
    """Whether the ranks of the machines come from the command line."""
    backend = command.option("torchrun", "--rdzv-backend")
    return backend is None or backend.text == "static"


RULES = (rendezvous, deprecated_launcher, node_ranks_in_sequence, fixed_node_rank)
