"""Rules about the address and the port of the first machine."""

import re
from collections.abc import Iterator

from rankzero.commands.jobs.check.command import Command
from rankzero.commands.jobs.check.finding import RISKY, WRONG, Finding
from rankzero.commands.jobs.check.machines import LOCAL_ADDRESS, uses_machines
from rankzero.commands.jobs.check.rules.variables import STARTERS, is_in_training, text_of
from rankzero.commands.jobs.check.user_script import UserScript

_PORTS = {
    "slurm": "$((20000 + SLURM_JOB_ID % 12000))",
    "pbs": "$((20000 + ${PBS_JOBID%%[!0-9]*} % 12000))",
}
"""Scheduler -> a port that differs between jobs."""

_HOSTNAME = r"\$\(\s*hostname|`\s*hostname"

DEFAULT_PORT = 29400
"""Port of torchrun's c10d rendezvous if its endpoint has none."""


def compressed_lists(script: UserScript) -> Iterator[Finding]:
    """An address that is taken from Slurm's compressed list of nodes."""
    head = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
    for command in script.commands:
        for name, assignment in command.assignments.items():
            if assignment.is_array or not (name == "MASTER_ADDR" or is_in_training(script, name)):
                continue
            is_address = name == "MASTER_ADDR" or re.search(r"ADDR|HEAD|HOST(?!S|_?LIST)|MASTER", name.upper())
            expands = re.search(r"scontrol|hostlist|nodeset|python|expand|genders", assignment.text)
            several = any(uses_machines(script, other) for other in script.training)
            is_list = re.search(r"SLURM_(JOB_|STEP_)?NODELIST", assignment.text)
            if is_address and several and is_list and not expands:
                found = "the list of nodes is compressed, such as n[1-4]; it is not the name of a machine"
                yield Finding(command.line, WRONG, found, f"{name}={head}")
            has_all = is_address and re.fullmatch(r"[$(`]+\s*scontrol show hostnames?[^|]*", assignment.text)
            if has_all and several:
                yield Finding(command.line, WRONG, f"{name} contains the names of all machines", f"{name}={head}")


def random_values(script: UserScript) -> Iterator[Finding]:
    """A random value in each task, where all tasks need the same."""
    for command in script.training:
        if not (command.is_nested and command.launchers and command.launchers[0] in STARTERS):
            continue
        names = ("--rdzv-id", "--rdzv-endpoint", "--master-port")
        values = [text_of(command.option("torchrun", *names)), *(item.text for item in command.assignments.values())]
        is_random = any(re.search(r"\bRANDOM\b|\bshuf\b|\$\$", value) for value in values)
        if is_random and not any("RANDOM" in word.expanded or word.substituted for word in command.words):
            found = "each task computes its own random value, so that the tasks never find each other"
            yield Finding(command.line, WRONG, found, "a value that the job script computes once, and exports")


def fixed_ports(script: UserScript) -> Iterator[Finding]:
    """Ports that do not exist, or that two jobs on one machine would share."""
    for command in script.commands:
        for assignment in command.assignments.values():
            if re.fullmatch(r"\$\(\(\s*[0-9]{4,}\s*\+\s*\$?\{?SLURM_JOB_?ID\}?\s*\)\)", assignment.text):
                yield Finding(
                    command.line,
                    WRONG,
                    "the sum exceeds 65535, the highest port, if the id of the job is large",
                    _PORTS["slurm"],
                )
    assigned, seen = set(), set()
    if script.is_exclusive:  # no other job is on the machines
        return
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
    if endpoint is None or nodes is None or script.count(nodes.text, command) == 1:
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
            is_used = name == "MASTER_ADDR" or is_in_training(script, name)
            if _is_address_list(assignment.text) and is_used:
                found = "the output of `hostname` with this option may be 127.0.1.1, or several addresses"
                yield Finding(command.line, RISKY, found, "the name of the machine")
            is_own = command.is_nested and name == "MASTER_ADDR" and not assignment.words[0].substituted
            if is_own and re.match(_HOSTNAME, assignment.text) and _starts_tasks(script, command.line):
                yield _own_name(command.line)
    for command in script.training:
        for word in command.words:
            local = re.search(r"tcp://(localhost|127\.[0-9.]+)\b", script.resolved(word.text, command))
            if local and several:
                yield _waits_for_itself(command.line, local[0])
        if command.launchers[:1] and command.launchers[0] in STARTERS:
            yield from _own_names(command)


def _own_names(command: Command) -> Iterator[Finding]:
    """Yields a finding if each machine inserts its own name as the address of the first machine."""
    words = [command.option("torchrun", "--rdzv-endpoint"), command.option("torchrun", "--master-addr")]
    words.append(command.option("accelerate", "--main-process-ip"))
    words += [word for word in command.words if word.text.startswith(("MASTER_ADDR=", "tcp://"))]
    if any(word and re.search(_HOSTNAME, word.text) and not word.substituted for word in words):
        yield _own_name(command.line)


def _own_name(line: int) -> Finding:
    found = "each machine runs $(hostname) itself, and gets its own name as the address of the first machine"
    return Finding(line, WRONG, found, "the name of the first machine, from the job script")


def _starts_tasks(script: UserScript, line: int) -> bool:
    """Returns whether the command in a line starts training on several machines."""
    launchers = [other.launchers[0] for other in script.training if other.line == line and other.launchers]
    return bool(set(STARTERS) & set(launchers))


def _waits_for_itself(line: int, address: str) -> Finding:
    """Returns the finding for an address at which each machine reaches only itself."""
    found = f"with {address}, each machine waits for the others on itself"
    return Finding(line, WRONG, found, "the name of the first machine")


def _is_address_list(text: str) -> bool:
    """Whether a text is the output of `hostname -i`, `-I` or `--ip-address`."""
    options = r"\bhostname\s+(--ip-address|--all-ip-addresses|-i|-I)\b"
    return bool(re.search(options, text)) and not re.search(r"\b(awk|cut|head|sed)\b", text)


RULES = (compressed_lists, random_values, fixed_ports, addresses)
