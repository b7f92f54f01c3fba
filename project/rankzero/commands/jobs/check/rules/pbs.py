"""Rules for job scripts of PBS (OpenPBS, PBS Professional)."""

import re
from collections.abc import Iterator

from rankzero.commands.jobs.check.command import Command
from rankzero.commands.jobs.check.finding import RISKY, WRONG, Finding
from rankzero.commands.jobs.check.machines import C10D, chunks_of
from rankzero.commands.jobs.check.user_script import UserScript

_ONE_PER_HOST = f'pbsdsh -- /path/to/torchrun "$PBS_O_WORKDIR/SCRIPT", with mpiprocs=1 and {C10D}'
_MISSING = {
    "PBS_NODEID": "does not exist: the text is empty",
    "PBS_NUM_NODES": "exists under Torque only",
    "PBS_NUM_PPN": "exists under Torque only",
    "PBS_NP": "exists under Torque only",
    "PBS_VNODENUM": "exists under Torque only",
}
"""Variable -> why it cannot be used."""


def resources(script: UserScript) -> Iterator[Finding]:
    """Reports chunks that may share a machine, and a missing walltime."""
    select, place = script.directive("select"), script.directive("place")
    if select and chunks_of(script) != 1 and (place is None or "scatter" not in place.value):
        yield Finding(select.line, RISKY, "PBS may put several chunks on one machine", "#PBS -l place=scatter")
    if script.directive("walltime") is None:
        found = "without a walltime, the default of the queue applies"
        yield Finding(script.first_directive_line, RISKY, found, "#PBS -l walltime=HH:MM:SS")


def missing_variables(script: UserScript) -> Iterator[Finding]:
    """Variables that PBS does not set."""
    for number, line in enumerate(script.lines, 1):
        if line.lstrip().startswith("#"):
            continue
        for name, reason in _MISSING.items():
            if re.search(rf"\$\{{?{name}\b", line):
                level = WRONG if name == "PBS_NODEID" else RISKY
                instead = (
                    _ONE_PER_HOST if "NODE" in name and name != "PBS_NUM_NODES" else 'sort -u "$PBS_NODEFILE" | wc -l'
                )
                if name in ("PBS_NP", "PBS_NUM_PPN"):
                    instead = 'wc -l <"$PBS_NODEFILE", the number of all processes'
                yield Finding(number, level, f"${name} {reason}", instead)


def working_folder(script: UserScript) -> Iterator[Finding]:
    """Relative paths in a job that starts in the home folder."""
    for command in script.training:
        earlier = script.before(command)
        if "pbsdsh" in command.launchers:  # its tasks start in the home folder
            earlier = (other for other in earlier if other.program == "pbsdsh")
        moved = any(word.text in ("cd", "pushd") for other in earlier for word in other.words)
        relative = command.script.endswith(".py") and not command.script.startswith(("/", "$", "~"))
        if relative and not moved and script.directive("d", "w", "wd") is None:
            where = "tasks of pbsdsh start" if "pbsdsh" in command.launchers else "the job starts"
            instead = 'cd "$PBS_O_WORKDIR"'
            if "pbsdsh" in command.launchers:
                instead = f'"$PBS_O_WORKDIR/{command.script}"'
            found = f"{where} in the home folder, where {command.script} is not found"
            yield Finding(command.line, WRONG, found, instead)
            return


def first_machine_only(script: UserScript) -> Iterator[Finding]:
    """Commands that start on the first machine only."""
    chunks = chunks_of(script)
    for command in script.training:
        if chunks == 1:
            return
        size = f"a job of {chunks} chunks"
        if not command.launchers:
            found = f"one process starts, on the first machine, in {size}"
            instead = f'mpirun --hostfile "$PBS_NODEFILE" {command.text}'
            yield Finding(command.line, WRONG, found, instead)
        elif command.launchers == ["torchrun"]:
            found = f"torchrun starts on the first machine only, in {size}"
            yield Finding(command.line, WRONG, found, _ONE_PER_HOST)


def tasks_of_pbsdsh(script: UserScript) -> Iterator[Finding]:
    """Reports variables, modules and signals that do not reach the tasks of pbsdsh."""
    for command in script.commands:
        if command.program != "pbsdsh" or not command.trains:
            continue
        program = _program(command)
        is_found = program in ("sh", "bash", "env") or program.startswith(("/", "$"))
        if program and not is_found and not command.is_nested:
            found = f"the tasks of pbsdsh have PATH=/bin:/usr/bin, where {program} is not found, or is another one"
            instead = re.sub(rf"(?<=\s){re.escape(program)}(?=\s|$)", f"/path/to/{program}", command.text, count=1)
            yield Finding(command.line, WRONG, found, instead)
        for other in script.before(command):
            if other.is_export and not other.position.in_function:
                for name in other.assignments:
                    if not any(word.text.startswith(f"{name}=") for word in command.words):
                        found = f"the tasks of pbsdsh do not get {name}"
                        yield Finding(other.line, WRONG, found, f"pbsdsh -- /usr/bin/env {name}=VALUE PROGRAM")
            loads = other.program == "module" and [word.text for word in other.words[1:2]] in (["load"], ["add"])
            if loads and other.text not in command.text:
                found = "the tasks of pbsdsh do not get what this line sets"
                yield Finding(other.line, RISKY, found, f"pbsdsh -- /bin/bash -lc '{other.text} && PROGRAM'")
        if not any(other.program == "trap" for other in script.commands):
            found = "at SIGTERM, pbsdsh ends before its tasks: the script ends too, and PBS kills tasks that are saving"
            yield Finding(command.line, RISKY, found, "trap : TERM, and wait for the processes, as submit.py does")


def _program(command: Command) -> str:
    """Returns the program that pbsdsh starts; empty if there is none."""
    words = [word.text for word in command.words[1:]]
    while words and words[0].startswith("-"):
        option = words.pop(0)
        if option == "--":
            break
        if option in ("-n", "-c", "-h") and words:
            del words[0]
    return words[0] if words else ""


RULES = (resources, missing_variables, working_folder, first_machine_only, tasks_of_pbsdsh)
