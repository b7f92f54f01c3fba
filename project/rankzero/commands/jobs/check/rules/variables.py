"""Rules about variables: where they are expanded, and which of them the tasks get."""

import re
from collections.abc import Iterator

from rankzero.commands.jobs.check.bash import here_documents
from rankzero.commands.jobs.check.command import Command, Word
from rankzero.commands.jobs.check.finding import Finding
from rankzero.commands.jobs.check.user_script import UserScript

_OF_TASKS = {
    "slurm": {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
    "pbs": {"PBS_NODENUM": "0", "PBS_TASKNUM": "1"},
    "": {},
}
"""Scheduler -> variable that differs between tasks -> its value in the job script."""

_OF_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_NODE_RANK", "PMI_RANK", "PMIX_RANK")
"""Variables that only the processes of mpirun have."""

_RANKS = ("RANK", "NODEID", "NODE_ID")
"""Suffixes of variables that contain a rank."""

_DEVICES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Variables that choose the devices of a process."""

_USED = r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*))"
"""Pattern of an expanded variable."""

_INHERITED = {"PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "HOME", "TMPDIR", "USER", "CUDA_VISIBLE_DEVICES"}
"""Variables that usually are exported before the script begins."""

_ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
"""Variables that `torch.distributed` reads in each task."""

STARTERS = ("srun", "pbsdsh", "mpirun")
"""Launchers that start the same command on all machines."""


def is_in_training(script: UserScript, name: str) -> bool:
    """Whether a training command contains a variable."""
    used = re.compile(rf"\$\{{?{name}\b")
    return any(used.search(command.text) or used.search(_texts(command)) for command in script.training)


def _texts(command: Command) -> str:
    """Returns the values of the variables in a command."""
    names = re.findall(r"\$\{?(\w+)", command.text)
    return " ".join(command.values[name].text for name in names if name in command.values)


def variables_of_tasks(script: UserScript) -> Iterator[Finding]:
    """Variables that differ between tasks, but that the job script expands itself."""
    values = _OF_TASKS[script.scheduler] | dict.fromkeys(_OF_MPI, "empty")
    for command in script.commands:
        words = []
        if _is_started(script, command) and command.trains:
            words += [*command.words, *(word for item in command.assignments.values() for word in item.words)]
            backend = command.option("torchrun", "--rdzv-backend")
            if backend is not None and backend.text != "static":  # torchrun ignores the node rank
                rank = text_of(command.option("torchrun", "--node-rank"))
                given = (rank, f"--node-rank={rank}", f"--node_rank={rank}")
                words = [word for word in words if not rank or word.text not in given]
        if _is_followed_by_launcher(script, command):
            for name, assignment in command.assignments.items():
                if name.upper().endswith(_RANKS) or name in _DEVICES or is_in_training(script, name):
                    words += assignment.words
        for name in sorted({name for word in words for name in word.expanded & values.keys()}):
            value = "an empty string" if values[name] == "empty" else values[name]
            found = f"the job script expands ${name} itself, to {value}, so that all tasks get the same value"
            yield Finding(command.line, found, _unexpanded(script, command, name))


def _unexpanded(script: UserScript, command: Command, name: str) -> str:
    """Returns how to let each task expand a variable itself."""
    if command.is_nested:
        return f"\\${name}, which bash -c expands in each task"
    own = {variable for word in command.words for variable in word.expanded} & command.values.keys()
    unexported = sorted(own - _exported(script))
    export = f"export {' '.join(unexported)}, and " if unexported else ""
    return f"{export}{_launcher(script)} bash -c '...', with ${name} in the quotes"


def _exported(script: UserScript) -> set[str]:
    """Returns the names of the variables that the script exports."""
    names = {name for command in script.commands if command.is_export for name in command.assignments}
    for command in re.findall(r"\b(?:export|declare -x|typeset -x) ([^;&|\n]*)", script.code):
        names.update(re.findall(r"(?:^|\s)([A-Za-z_]\w*)", command))
    return names


def unexported_variables(script: UserScript) -> Iterator[Finding]:
    """Variables of the script that its tasks need, and do not get because they are not exported."""
    if re.search(r"\bset -\w*a|set -o allexport|\b(source|\.) ", script.code):
        return
    exported = _exported(script)
    seen: set[str] = set()
    for command in script.training:
        assigned = {
            name: other
            for other in script.before(command)
            for name in other.assignments
            if not other.words and not other.is_nested
        }
        inside = {
            name
            for other in script.commands
            for name in other.assignments
            if other.is_nested and other.line == command.line
        }
        for name in sorted(_needed(command) & assigned.keys() - exported - seen - inside - _INHERITED):
            if any(word.text.startswith((f"{name}=", "--export")) for word in command.words):
                continue
            seen.add(name)
            found = f"{name} is not exported, so that the tasks do not get it"
            line, text = assigned[name].line, assigned[name].assignments[name].text
            yield Finding(line, found, f"export {name}={text}")


def _needed(command: Command) -> set[str]:
    """Returns the names of the variables that the tasks of a command expand, or that `torch.distributed` reads."""
    if command.launchers[:1] not in (["srun"], ["mpirun"]):
        return set()
    if command.is_nested:
        used = {(first or second, word) for word in command.words for first, second in re.findall(_USED, word.text)}
        return {name for name, word in used if name not in word.expanded} - command.assignments.keys()
    is_given = any(name in word.expanded for word in command.words for name in _ENVIRONMENT)
    if len(command.launchers) > 1 or is_given or command.is_open(command.launchers[0]):
        return set()
    return set(_ENVIRONMENT) if command.script.endswith(".py") else set()


def here_document_variables(script: UserScript) -> Iterator[Finding]:
    """Variables of tasks that bash expands while it writes a here-document."""
    for document in here_documents(script.text):
        for name in _OF_TASKS[script.scheduler] if document.is_expanded else ():
            if re.search(rf"(?<!\\)\$\{{?{name}\b", document.text):
                found = f"bash expands ${name} here, while it reads the here-document: all tasks get the same value"
                yield Finding(document.line, found, f"<<'EOF', or \\${name}")


def text_of(word: Word | None) -> str:
    """Returns the text of a word; empty without a word."""
    return "" if word is None else word.text


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
    return next((name for name in outer if name in STARTERS), default)


RULES = (variables_of_tasks, unexported_variables, here_document_variables)
