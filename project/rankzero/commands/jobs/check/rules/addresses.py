"""Rules about the address and the port of the first machine."""

import re
from collections.abc import Iterator

from rankzero.commands.jobs.check.command import Command
from rankzero.commands.jobs.check.finding import Finding
from rankzero.commands.jobs.check.machines import LOCAL_ADDRESS, uses_machines
from rankzero.commands.jobs.check.rules.variables import STARTERS, is_in_training, text_of
from rankzero.commands.jobs.check.user_script import UserScript

_PORT = "$((20000 + SLURM_JOB_ID % 12000))"
"""A port that differs between jobs."""

_HOSTNAME = r"\$\(\s*hostname|`\s*hostname"


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
                yield Finding(command.line, found, f"{name}={head}")
            has_all = is_address and re.fullmatch(r"[$(`]+\s*scontrol show hostnames?[^|]*", assignment.text)
            if has_all and several:
                yield Finding(command.line, f"{name} contains the names of all machines", f"{name}={head}")


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
            yield Finding(command.line, found, "a value that the job script computes once, and exports")


def ports_from_ids(script: UserScript) -> Iterator[Finding]:
    """Ports that do not exist."""
    for command in script.commands:
        for assignment in command.assignments.values():
            if re.fullmatch(r"\$\(\(\s*[0-9]{4,}\s*\+\s*\$?\{?SLURM_JOB_?ID\}?\s*\)\)", assignment.text):
                yield Finding(
                    command.line,
                    "the sum exceeds 65535, the highest port, if the id of the job is large",
                    _PORT,
                )


def addresses(script: UserScript) -> Iterator[Finding]:
    """Addresses at which a machine reaches only itself."""
    several = any(uses_machines(script, command) for command in script.training)
    for command in script.commands:
        for name, assignment in command.assignments.items():
            is_local = name == "MASTER_ADDR" and re.fullmatch(LOCAL_ADDRESS, assignment.text)
            if is_local and several and not any(command.option("torchrun", "--nnodes") for command in script.training):
                yield _waits_for_itself(command.line, f"MASTER_ADDR={assignment.text}")
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
    return Finding(line, found, "the name of the first machine, from the job script")


def _starts_tasks(script: UserScript, line: int) -> bool:
    """Returns whether the command in a line starts training on several machines."""
    launchers = [other.launchers[0] for other in script.training if other.line == line and other.launchers]
    return bool(set(STARTERS) & set(launchers))


def _waits_for_itself(line: int, address: str) -> Finding:
    """Returns the finding for an address at which each machine reaches only itself."""
    found = f"with {address}, each machine waits for the others on itself"
    return Finding(line, found, "the name of the first machine")


RULES = (compressed_lists, random_values, ports_from_ids, addresses)
