"""Rules about variables and addresses: where they are replaced, and what they contain."""

import re
from collections.abc import Iterator

from rankzero.commands.jobs.check.command import Command
from rankzero.commands.jobs.check.finding import RISKY, WRONG, Finding
from rankzero.commands.jobs.check.rules.machines import uses_machines
from rankzero.commands.jobs.check.rules.torchrun import LOCAL_ADDRESS
from rankzero.commands.jobs.check.user_script import UserScript

_OF_TASKS = {
    "slurm": {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
    "pbs": {"PBS_NODENUM": "0", "PBS_TASKNUM": "1"},
    "": {},
}
"""Scheduler -> variable that differs between tasks -> its value in the job script."""

_OF_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_NODE_RANK", "PMI_RANK", "PMIX_RANK")
"""Variables that only the processes of mpirun have."""

_PORTS = {
    "slurm": "$((20000 + SLURM_JOB_ID % 12000))",
    "pbs": "$((20000 + ${PBS_JOBID%%[!0-9]*} % 12000))",
}
"""Scheduler -> a port that differs between jobs."""

_STARTERS = ("srun", "pbsdsh", "mpirun")
"""Launchers that start the same command on all machines."""

DEFAULT_PORT = 29400
"""Port of torchrun's c10d rendezvous if its endpoint has none."""


def variables_of_tasks(script: UserScript) -> Iterator[Finding]:
    """Variables that differ between tasks, but that the job script replaces by its own value."""
    values = _OF_TASKS[script.scheduler] | dict.fromkeys(_OF_MPI, "empty")
    for command in script.commands:
        words = []
        if _is_started(script, command) and command.trains:
            words += [*command.words, *(word for item in command.assignments.values() for word in item.words)]
        if _is_followed_by_launcher(script, command):
            for name, assignment in command.assignments.items():
                if name.upper().endswith(("RANK", "NODEID", "NODE_ID")) or _is_in_training(script, name):
                    words += assignment.words
        for name in sorted({name for word in words for name in word.expanded & values.keys()}):
            text = "which is empty there" if values[name] == "empty" else f"{values[name]}: all tasks get the same"
            found = f"the job script replaces ${name} by its own value, {text}"
            yield Finding(command.line, WRONG, found, f"{_launcher(script)} bash -c '...', with ${name} in the quotes")


def _is_started(script: UserScript, command: Command) -> bool:
    """Whether a launcher starts a command, or has to."""
    return command.launchers[:1] != ["ssh"] and (bool(command.launchers) or script.scheduler == "pbs")


def _is_followed_by_launcher(script: UserScript, command: Command) -> bool:
    """Whether a command sets variables in the job script itself, and tasks start after it."""
    if not command.assignments or command.words or command.position.in_function:
        return False
    return any(other.launchers[:1] and other.trains for other in script.after(command))


def _launcher(script: UserScript) -> str:
    """Returns the launcher that starts the first training command."""
    outer = (command.launchers[0] for command in script.training if command.launchers)
    default = "pbsdsh -- /bin/bash" if script.scheduler == "pbs" else "srun"
    return next((name for name in outer if name in _STARTERS), default)


def fixed_ports(script: UserScript) -> Iterator[Finding]:
    """Ports that two jobs on one machine would share."""
    assigned, seen = set(), set()
    for command in script.commands:
        for line, text in _ports(script, command):
            port = re.search(r"[0-9]+$", text)
            if port and port[0] not in assigned and (line, port[0]) not in seen:
                seen.add((line, port[0]))
                if line != command.line or not command.words:  # the other commands use the same variable
                    assigned.add(port[0])
                found = f"two jobs on one machine cannot both use port {port[0]}"
                instead = "a port that no other job uses"
                if script.scheduler:
                    instead = text[: port.start()] + _PORTS[script.scheduler]
                yield Finding(line, RISKY, found, instead)


def _ports(script: UserScript, command: Command) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each port or endpoint with a fixed port in a command."""
    for name, assignment in command.assignments.items():
        if name == "MASTER_PORT" and assignment.text.isdigit():
            yield command.line, assignment.text
    if not command.trains:
        return
    for word in command.words:
        if match := re.search(r"(?:^MASTER_PORT=|tcp://[^/]*:)([0-9]+)$", word.text):
            yield command.line, match[1]
    for launcher, name in (("torchrun", "--master-port"), ("accelerate", "--main-process-port")):
        given = command.option(launcher, name)
        if given and given.text.isdigit() and given.text != "0":
            yield command.line, given.text
    nodes = command.option("torchrun", "--nnodes")
    endpoint = command.option("torchrun", "--rdzv-endpoint")
    if endpoint is None or nodes is None or script.resolved(nodes.text, command) == "1":
        return
    text = script.resolved(endpoint.text, command)
    if re.search(r":[0-9]+$", text) and not text.endswith(":0"):
        variable = re.fullmatch(r"\$\{?(\w+)\}?", endpoint.text.rpartition(":")[2])
        if variable is None or variable[1] not in command.values:
            yield command.line, endpoint.text
        elif variable[1] != "MASTER_PORT":
            yield command.values[variable[1]].line, command.values[variable[1]].text
    elif _has_no_port(text):
        yield command.line, f"{endpoint.text}:{DEFAULT_PORT}"


def _has_no_port(endpoint: str) -> bool:
    """Whether an endpoint certainly has no port: a name, an address, or the output of `hostname`."""
    return bool(re.fullmatch(r"[\w.-]+|\$\(\s*hostname\b[^()]*\)|`\s*hostname\b[^`]*`", endpoint))


def addresses(script: UserScript) -> Iterator[Finding]:
    """Addresses at which a machine reaches only itself, and addresses that may not be one name."""
    several = any(uses_machines(script, command) for command in script.training)
    for command in script.commands:
        for name, assignment in command.assignments.items():
            is_local = name == "MASTER_ADDR" and re.fullmatch(LOCAL_ADDRESS, assignment.text)
            if is_local and several and not any(command.option("torchrun", "--nnodes") for command in script.training):
                yield _waits_for_itself(command.line, f"MASTER_ADDR={assignment.text}")
            is_used = name == "MASTER_ADDR" or _is_in_training(script, name)
            if _is_address_list(assignment.text) and is_used:
                found = "the output of `hostname` with this option may be 127.0.1.1, or several addresses"
                yield Finding(command.line, RISKY, found, "the name of the machine")
    for command in script.training:
        for word in command.words:
            local = re.search(r"tcp://(localhost|127\.[0-9.]+)\b", script.resolved(word.text, command))
            if local and several:
                yield _waits_for_itself(command.line, local[0])
        if command.launchers[:1] and command.launchers[0] in _STARTERS:
            yield from _own_names(command)


def _own_names(command: Command) -> Iterator[Finding]:
    """Yields a finding if each machine inserts its own name as the address of the first machine."""
    words = [command.option("torchrun", "--rdzv-endpoint"), command.option("torchrun", "--master-addr")]
    words.append(command.option("accelerate", "--main-process-ip"))
    words += [word for word in command.words if word.text.startswith(("MASTER_ADDR=", "tcp://"))]
    if any(word and re.search(r"\$\(\s*hostname|`\s*hostname", word.text) and not word.substituted for word in words):
        found = "each machine replaces $(hostname) by its own name, and waits for the others on itself"
        yield Finding(command.line, WRONG, found, "the name of the first machine, from the job script")


def _waits_for_itself(line: int, address: str) -> Finding:
    """Returns the finding for an address of the own machine."""
    found = f"with {address}, each machine waits for the others on itself"
    return Finding(line, WRONG, found, "the name of the first machine")


def _is_address_list(text: str) -> bool:
    """Whether a text is the output of `hostname -i`, `-I` or `--ip-address`."""
    options = r"\bhostname\s+(--ip-address|--all-ip-addresses|-i|-I)\b"
    return bool(re.search(options, text)) and not re.search(r"\b(awk|cut|head|sed)\b", text)


def _is_in_training(script: UserScript, name: str) -> bool:
    """Whether a training command contains a variable."""
    used = re.compile(rf"\$\{{?{name}\b")
    return any(used.search(command.text) or used.search(_texts(command)) for command in script.training)


def _texts(command: Command) -> str:
    """Returns the values of the variables in a command."""
    names = re.findall(r"\$\{?(\w+)", command.text)
    return " ".join(command.values[name].text for name in names if name in command.values)


RULES = (variables_of_tasks, fixed_ports, addresses)
