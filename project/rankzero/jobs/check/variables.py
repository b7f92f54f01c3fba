"""Rules about variables: where they are expanded, which of them the tasks get, and the address of the first machine."""

import re
from collections.abc import Iterator, Sequence

from rankzero.jobs.check.commands import LITERAL
from rankzero.jobs.check.launchers import LOCAL_ADDRESS, is_static, machines_of, node_rank
from rankzero.jobs.check.script import OUTER, Finding, Script, resolved

_OF_TASKS = r"\$\{?(SLURM_(?:PROCID|LOCALID|NODEID)|PBS_NODE(?:NUM|ID)|(?:OMPI_COMM_WORLD_(?:\w*_)?|PMIX?_)RANK)\b"
"""Pattern of an expanded variable that differs between tasks."""

_INHERITED = re.compile(r"\w*PATH|HOME|USER|TMPDIR|LANG|(CUDA|OMP|SLURM|PBS)_\w+")
_HEAD = 'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
_ADDRESS_OPTIONS = ("--rdzv-endpoint", "--master-addr", "--main-process-ip")
_NODE_LIST = r"\$\{?SLURM_(?:JOB_)?NODELIST"
_RANDOM = r"\bRANDOM\b|\bshuf\b|uuidgen|\$\$"


def expanded(script: Script) -> Iterator[Finding]:
    """Variables that differ between tasks, but that the job script expands itself."""
    for i, command in enumerate(script.commands):
        texts: Sequence[str] = ()
        if command.trains and {*OUTER} & {*command.launchers}:
            texts = (*command.words, *command.assignments.values())
        elif command.is_export and any({*OUTER} & {*other.launchers} for other in script.commands[i:]):
            texts = [
                text for name, text in command.assignments.items() if re.fullmatch(r"\w*RANK|\w+_VISIBLE_DEVICES", name)
            ]
        values = [resolved(command.values, text) for text in texts if command.is_certain]
        if not is_static(command):  # torchrun ignores the node rank
            values = [value for value in values if value.rpartition("=")[2] != node_rank(command)]
        nodes, tasks = script.machines(command), script.tasks_per_machine(command) or 1
        same = dict.fromkeys(("NODEID", "NODENUM"), nodes in (1, None)) | {"LOCALID": tasks == 1}
        same["PROCID"] = nodes == tasks == 1 or not script.scheduler
        for name in sorted({*re.findall(_OF_TASKS, " ".join(values))}):
            if not same.get(name.partition("_")[2]):
                found = f"the job script expands ${name} itself, so that all tasks get the same value"
                yield command.line, found, f"\\${name}" if command.is_nested else f"bash -c '... ${name} ...'"


def lost(script: Script) -> Iterator[Finding]:
    """Variables that the script sets, and that its tasks need and do not get."""
    if script.reads_settings or re.search(r"\bset -\w*a|set -o allexport", script.code):
        return
    exports = " ".join(re.findall(r"\b(?:export|declare -x|typeset -x) ([^;&|\n]*)", script.code))
    inside = {name for command in script.commands if command.is_nested for name in command.assignments}
    assigned = {name: other.line for other in script.commands if not other.words for name in other.assignments}
    used = re.findall(r"\$\{?(\w+)", re.sub(r"^\s*echo .*", "", script.code, flags=re.MULTILINE))
    for command in script.training:
        outer, words = (*command.launchers, "")[0], " ".join(command.words)
        needed = {*re.findall(rf"{LITERAL}\{{?(\w+)", words)}
        if command.launchers[1:] == [] and command.trains and not command.is_open(outer):
            needed |= {"MASTER_ADDR", "MASTER_PORT"} - {*used}
        kept = {*inside, *re.findall(r"(\w+)=", words), *filter(_INHERITED.fullmatch, needed)}
        kept |= {*re.findall(r"(?:^|\s)([A-Za-z_]\w*)", exports)} if outer != "pbsdsh" else set()
        for name in sorted(needed & assigned.keys() - kept) if outer in OUTER and "--export" not in words else ():
            instead = f"{name} in the command of pbsdsh" if outer == "pbsdsh" else f"export {name}"
            yield assigned[name], f"the tasks of {outer} do not get {name}", instead


def addresses(script: Script) -> Iterator[Finding]:
    """Addresses at which a machine reaches only itself, and lists of machines in place of an address."""
    several = [command for command in script.training if {*OUTER} & {*command.launchers}]
    several = [command for command in several if (script.machines(command) or 1) > 1]
    cut = rf"\$\(echo {_NODE_LIST}\}}? \| cut -d ?[\"']?,[\"']? -f ?1\)"
    for command in script.commands if several else ():
        address = command.assignments.get("MASTER_ADDR", "") if command.is_certain else ""
        is_started = command.line in [other.line for other in several]
        options = [command.option(name, *_ADDRESS_OPTIONS) or "" for name in command.launchers]
        options += [word for word in command.words if word.startswith(("MASTER_ADDR=", "tcp://"))]
        if re.fullmatch(rf"{_NODE_LIST}(%%,\*)?\}}?|{cut}", address):
            yield command.line, "the list of nodes is compressed, such as n[1-4], and names no machine", _HEAD
        elif re.fullmatch(r"\$\(\s*scontrol show hostnames?[^|]*", address):
            yield command.line, "MASTER_ADDR contains the names of all machines", _HEAD
        elif re.fullmatch(LOCAL_ADDRESS, address) and not any(machines_of(script, other) for other in several):
            yield command.line, f"with MASTER_ADDR={address}, each machine waits for the others on itself", _HEAD
        elif is_started and re.search(rf"{LITERAL}\(\s*hostname", " ".join([address, *options])):
            found = "each machine runs $(hostname) itself, and gets its own name as the address of the first machine"
            yield command.line, found, "the name of the first machine, from the job script"
        elif is_started and (local := re.search(r"tcp://(localhost|127\.[0-9.]+)\b", " ".join(options))):
            yield command.line, f"with {local[0]}, each machine waits for the others on itself", _HEAD


def random_values(script: Script) -> Iterator[Finding]:
    """A random value that each machine computes itself, where all machines need the same."""
    for command in script.training:
        names = ("--rdzv-id", "--rdzv-endpoint", "--master-port")
        value = resolved(command.values, " ".join(command.option("torchrun", name) or "" for name in names))
        in_tasks = {*OUTER} & {*command.launchers} and re.search(rf"{LITERAL}[^$]*({_RANDOM})", value)
        is_on_each = not script.scheduler and command.launchers == ["torchrun"] and re.search(_RANDOM, value)
        if in_tasks or (is_on_each and (machines_of(script, command) or 1) > 1):
            found = "each machine computes its own random value, so that the machines never find each other"
            yield command.line, found, "a value that is the same on all machines"


RULES = (expanded, lost, addresses, random_values)
