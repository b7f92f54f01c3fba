"""The number of machines and tasks of a command. Does not import torch."""

import re
from typing import NamedTuple

from rankzero.commands.jobs.check.command import Command
from rankzero.commands.jobs.check.user_script import UserScript

C10D = "--rdzv-backend=c10d --rdzv-id=JOB_ID --rdzv-endpoint=FIRST_MACHINE:PORT, without --node-rank"
"""Options of torchrun with which machines find each other."""

LOCAL_ADDRESS = r"(localhost|127\.[0-9.]+|\[?::1\]?)(:.*)?"
"""Addresses at which a machine reaches itself."""


class Shape(NamedTuple):
    """The tasks that a command of a Slurm job starts; None if the script does not state it.

    Args:
        nodes: Number of nodes.
        tasks: Number of tasks per node.
        gpus: Number of GPUs per node; 0 without a request.
    """

    nodes: int | None
    tasks: int | None
    gpus: int | None


def shape(script: UserScript, command: Command) -> Shape:
    """Returns the shape of a command: from the options of its srun, otherwise from the directives."""

    def number(directive: str, *options: str) -> tuple[bool, int | None]:
        given = command.option("srun", *options) if options else None
        if given is not None:
            return True, script.count(given.text, command)
        found = script.directive(directive)
        return found is not None, script.count(found.value, command) if found else None

    has_nodes, nodes = number("nodes", "--nodes", "-N")
    has_per_node, per_node = number("ntasks-per-node", "--ntasks-per-node")
    has_total, total = number("ntasks", "--ntasks", "-n")
    if not has_nodes:
        nodes = 1 if not has_total or total == 1 else None
    own_total = command.option("srun", "--ntasks", "-n") is not None
    if own_total and command.option("srun", "--nodes", "-N") is None and total and nodes:
        nodes = min(nodes, total)
    if has_total:  # --ntasks-per-node is then a maximum
        share = max(total // nodes, 1) if total and nodes else None
        has_maximum = has_per_node and not (own_total and command.option("srun", "--ntasks-per-node") is None)
        tasks = min(filter(None, (share, per_node)), default=None) if has_maximum else share
    else:
        tasks = per_node if has_per_node else 1
    return Shape(nodes, tasks, _gpus_per_node(script, nodes, tasks))


def _gpus_per_node(script: UserScript, nodes: int | None, tasks: int | None) -> int | None:
    """Returns the number of GPUs per node; 0 without a request, None if it is unknown."""
    gres = script.directive("gres")
    of_gres = next((part for part in gres.value.split(",") if part.startswith("gpu")), None) if gres else None
    if of_gres == "gpu":
        return 1
    factors = {"gpus-per-node": (1, 1), "gpus": (1, nodes), "gpus-per-task": (tasks, 1)}
    requests: list[tuple[str, int | None, int | None]] = [(of_gres, 1, 1)] if of_gres else []
    requests += [(found.value, *factors[name]) for name in factors if (found := script.directive(name))]
    for value, factor, divisor in requests:
        count = re.search(r"(?:^|:)([0-9]+)$", value)
        return int(count[1]) * factor // divisor if count and factor and divisor else None
    return 0


def chunks_of(script: UserScript) -> int:
    """Returns the number of chunks of a PBS job."""
    select = script.directive("select", "nodes")
    if select is None:
        return 1
    numbers = [re.match(r"[0-9]{1,9}(?=:|$)", part) for part in select.value.split("+")]
    return sum(int(number[0]) if number else 1 for number in numbers)  # without a number, one chunk


def processes_per_chunk(script: UserScript) -> int | None:
    """Returns the lines per chunk in the node file of a PBS job; None if the chunks differ."""
    select = script.directive("select", "nodes")
    if select is None or "+" in select.value:
        return None
    found = re.search(r"(?:mpiprocs|ppn)=([0-9]+)", select.value)
    return int(found[1]) if found else 1


def uses_machines(script: UserScript, command: Command) -> bool:
    """Whether a command certainly starts on several machines, or would if it were started on all of its job."""
    if script.scheduler == "slurm":
        nodes = shape(script, command).nodes
        return (nodes is not None and nodes > 1) or (nodes is None and script.directive("nodes") is not None)
    return script.scheduler == "pbs" and chunks_of(script) != 1
