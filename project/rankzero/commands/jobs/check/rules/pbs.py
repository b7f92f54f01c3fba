"""Rules for job scripts of PBS (OpenPBS, PBS Professional)."""

import re
from collections.abc import Iterator

from rankzero.commands.jobs.check.command import Command
from rankzero.commands.jobs.check.finding import Finding
from rankzero.commands.jobs.check.machines import C10D, chunks_of
from rankzero.commands.jobs.check.user_script import UserScript

_ONE_PER_HOST = f'pbsdsh -- /path/to/torchrun "$PBS_O_WORKDIR/SCRIPT", with mpiprocs=1 and {C10D}'


def missing_variables(script: UserScript) -> Iterator[Finding]:
    """A variable that PBS does not set."""
    for number, line in enumerate(script.lines, 1):
        if not line.lstrip().startswith("#") and re.search(r"\$\{?PBS_NODEID\b", line):
            yield Finding(number, "$PBS_NODEID does not exist: the text is empty", _ONE_PER_HOST)


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
            yield Finding(command.line, found, instead)
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
            yield Finding(command.line, found, instead)
        elif command.launchers == ["torchrun"]:
            found = f"torchrun starts on the first machine only, in {size}"
            yield Finding(command.line, found, _ONE_PER_HOST)


def tasks_of_pbsdsh(script: UserScript) -> Iterator[Finding]:
    """Reports programs and variables that the tasks of pbsdsh do not find."""
    for command in script.commands:
        if command.program != "pbsdsh" or not command.trains:
            continue
        program = _program(command)
        is_found = program in ("sh", "bash", "env") or program.startswith(("/", "$"))
        if program and not is_found and not command.is_nested:
            found = f"the tasks of pbsdsh have PATH=/bin:/usr/bin, where {program} is not found, or is another one"
            instead = re.sub(rf"(?<=\s){re.escape(program)}(?=\s|$)", f"/path/to/{program}", command.text, count=1)
            yield Finding(command.line, found, instead)
        for other in script.before(command):
            if other.is_export and not other.position.in_function:
                for name in other.assignments:
                    if not any(word.text.startswith(f"{name}=") for word in command.words):
                        found = f"the tasks of pbsdsh do not get {name}"
                        yield Finding(other.line, found, f"pbsdsh -- /usr/bin/env {name}=VALUE PROGRAM")


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


RULES = (missing_variables, working_folder, first_machine_only, tasks_of_pbsdsh)
