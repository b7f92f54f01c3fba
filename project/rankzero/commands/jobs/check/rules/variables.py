"""Rules about variables and addresses: where they are replaced, and what they contain."""

import re
from collections.abc import Iterator

from rankzero.commands.jobs.check.command import Command, Word
from rankzero.commands.jobs.check.finding import RISKY, WRONG, Finding
from rankzero.commands.jobs.check.rules.torchrun import LOCAL_ADDRESS
from rankzero.commands.jobs.check.user_script import UserScript

_OF_TASKS = {
    "slurm": {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
    "pbs": {"PBS_NODENUM": "0", "PBS_TASKNUM": "1"},
}
"""Scheduler -> variable that differs between tasks -> its value in the job script."""

_PORTS = {
    "slurm": "$((20000 + SLURM_JOB_ID % 12000))",
    "pbs": "$((20000 + ${PBS_JOBID%%[!0-9]*} % 12000))",
    "": "a port that no other job uses",
}
"""Scheduler -> a port that differs between jobs."""

DEFAULT_PORT = 29400
"""Port of torchrun's c10d rendezvous if its endpoint has none."""


def variables_of_tasks(script: UserScript) -> Iterator[Finding]:
    """Variables that differ between tasks, but that the job script replaces by its own value."""
    values = _OF_TASKS.get(script.scheduler, {})
    for command in script.commands:
        is_started = command.launchers[:1] and command.launchers[0] in ("srun", "pbsdsh", "mpirun")
        is_started = is_started or (script.scheduler == "pbs" and command.trains)
        exported = command.assignments.values() if _is_followed_by_launcher(script, command) else ()
        words = (*(command.words if is_started and command.trains else ()), *exported)
        for name in sorted({name for word in words for name in word.expanded & values.keys()}):
            found = f"the job script replaces ${name} by its own value, {values[name]}: all tasks get the same"
            yield Finding(command.line, WRONG, found, f"{_launcher(script)} bash -c '...', with ${name} in the quotes")


def _is_followed_by_launcher(script: UserScript, command: Command) -> bool:
    """Whether a command sets variables in the job script itself, and tasks start after it."""
    if not command.assignments or command.words or command.in_function:
        return False
    return any(other.launchers[:1] and other.trains for other in script.after(command))


def _launcher(script: UserScript) -> str:
    """Returns the launcher of the first training command."""
    return next((command.launchers[0] for command in script.training if command.launchers), "srun")


def fixed_ports(script: UserScript) -> Iterator[Finding]:
    """Ports that two jobs on one machine would share."""
    seen = set()
    for command in script.commands:
        for line, text in _ports(script, command):
            port = re.search(r"[0-9]+$", text)
            if port and (line, port[0]) not in seen:
                seen.add((line, port[0]))
                found = f"two jobs on one machine cannot both use port {port[0]}"
                yield Finding(line, RISKY, found, text[: port.start()] + _PORTS[script.scheduler])


def _ports(script: UserScript, command: Command) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each port or endpoint with a fixed port in a command."""
    for name, word in command.assignments.items():
        if name == "MASTER_PORT" and word.text.isdigit():
            yield command.line, word.text
    if not command.trains:
        return
    if (port := _forwarded_port(command)) and port.text:
        yield command.line, port.text
    given = command.option("torchrun", "--master-port")
    if given and given.text.isdigit():
        yield command.line, given.text
    nodes = command.option("torchrun", "--nnodes")
    endpoint = command.option("torchrun", "--rdzv-endpoint")
    if endpoint is None or nodes is None or script.resolved(nodes.text, command) == "1":
        return
    text = script.resolved(endpoint.text, command)
    if re.search(r":[0-9]+$", text) and not text.endswith(":0"):
        variable = re.fullmatch(r"\$\{?(\w+)\}?", endpoint.text.rpartition(":")[2] or endpoint.text)
        source = script.assignment(variable[1], command) if variable else None
        if source is None or not (variable and variable[1] == "MASTER_PORT"):
            yield source or (command.line, endpoint.text)
    elif _has_no_port(text):
        yield command.line, f"{endpoint.text}:{DEFAULT_PORT}"


def _has_no_port(endpoint: str) -> bool:
    """Whether an endpoint certainly has no port: a name, an address, or the output of `hostname`."""
    return bool(re.fullmatch(r"[\w.-]+|\$\(\s*hostname\b[^()]*\)|`\s*hostname\b[^`]*`", endpoint))


def _forwarded_port(command: Command) -> Word | None:
    """Returns the fixed port that mpirun passes on as `-x MASTER_PORT=PORT`; None without one."""
    for word in command.words:
        if match := re.fullmatch(r"MASTER_PORT=([0-9]+)", word.text):
            return word._replace(text=match[1])
    return None


def addresses(script: UserScript) -> Iterator[Finding]:
    """Addresses at which a machine reaches only itself, and addresses that may not be one name."""
    for command in script.commands:
        for name, word in command.assignments.items():
            if name == "MASTER_ADDR" and re.fullmatch(LOCAL_ADDRESS, word.text) and _uses_machines(script):
                found = f"with MASTER_ADDR={word.text}, each machine waits for the others on itself"
                yield Finding(command.line, WRONG, found, "the name of the first machine")
            if is_address_list(word.text) and _is_used_by_training(script, name):
                found = "the output of `hostname` with this option may be 127.0.1.1, or several addresses"
                yield Finding(command.line, RISKY, found, "the name of the machine")
    for command in script.training:
        for word in command.words:
            is_late = "$(hostname" in word.text.replace("$( ", "$(") and not word.substituted
            if is_late and command.launchers[:1] and command.launchers[0] in ("srun", "pbsdsh", "mpirun"):
                found = "each machine replaces $(hostname) by its own name, and waits for the others on itself"
                yield Finding(command.line, WRONG, found, "the name of the first machine, from the job script")


def is_address_list(text: str) -> bool:
    """Whether a text is the output of `hostname -i`, `-I` or `--ip-address`."""
    return bool(re.search(r"\bhostname\s+(--ip-address|--all-ip-addresses|-i|-I)\b", text)) and "awk" not in text


def _is_used_by_training(script: UserScript, name: str) -> bool:
    """Whether a variable is in a training command, or is the address of rank zero."""
    if name == "MASTER_ADDR":
        return True
    return any(re.search(rf"\$\{{?{name}\b", word.text) for command in script.training for word in command.words)


def _uses_machines(script: UserScript) -> bool:
    """Whether the job has several machines, as far as its directives tell."""
    nodes, select = script.directive("nodes"), script.directive("select")
    if nodes is not None:
        return nodes.value.partition(":")[0] != "1"
    return select is not None and not re.fullmatch(r"1(:[^+]*)?", select.value)


RULES = (variables_of_tasks, fixed_ports, addresses)
