"""A user's job script, as the rules of the check see it. Does not import torch."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property

from rankzero.jobs.check.commands import HERE_DOCUMENT, LITERAL, Command, name_of, parse

OUTER = ("srun", "pbsdsh", "mpirun")
"""Launchers that start a command on all machines of a job."""

_LONG_NAMES = {"e": "error", "N": "nodes", "n": "ntasks", "o": "output", "tasks-per-node": "ntasks-per-node"}
"""Short and old names of sbatch's options -> the name for the rules."""

_VARIABLE = r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})"
_CHANGES = r"^.*(?:\b(?:for|select|read|let|unset|mapfile|readarray|getopts|printf)\b|(?<!\$)\(\(|\]\+?=).*$"
"""Pattern of a line that may change the variables in it in ways that are not followed."""

Finding = tuple[int, str, str]
"""Number of the line, from 1; why the job fails, hangs or does not use its machines; what to write instead."""


class Script:
    """A job script, from its text."""

    def __init__(self, text: str) -> None:
        self.text = HERE_DOCUMENT.sub(lambda match: match[1] + "\n" * match[0].count("\n", len(match[1])), text)
        self.lines = self.text.split("\n")
        self.code = "\n".join("" if line.lstrip().startswith("#") else line for line in self.lines)
        settings = r"(^|[;&\s'\"])(source|\.) (?!.*(activate|conda|profile|modules))"
        self.reads_settings = bool(re.search(settings, self.code, re.MULTILINE))  # which may set any variable
        code_lines = (number for number, line in enumerate(self.code.split("\n"), 1) if line.strip())
        self.first_command = next(code_lines, len(self.lines) + 1)
        matches = re.finditer(r"^#(SBATCH|PBS)[ \t](.*)$", self.text, re.MULTILINE)
        directives = [(self.text.count("\n", 0, match.start()) + 1, match[1], match[2]) for match in matches]
        self.prefix = directives[0][1] if directives else ""
        self.scheduler = {"SBATCH": "slurm", "PBS": "pbs"}.get(self.prefix, "")
        found = [(number, text) for number, prefix, text in directives if prefix == self.prefix]
        self.ignored = [number for number, _ in found if number > self.first_command]
        read = [(number, text) for number, text in found if number < self.first_command]
        options = [(number, *option) for number, text in read for option in _options(text, self.scheduler)]
        self.directives = {name: value for _, name, value in options}
        self.directive_lines = {name: number for number, name, _ in options}

    @cached_property
    def commands(self) -> list[Command]:
        """The commands in their order."""
        parsed, commands = parse(self.text), list[Command]()
        changing = {*re.findall(r"\w+", " ".join(re.findall(_CHANGES, self.code, re.MULTILINE)))}
        changing |= {name for other in parsed if not other.is_certain for name in other.assignments}
        values: dict[str, str] = {}
        for command in parsed:
            command = replace(command, values=dict(values))
            commands += _inner(command) or [command]
            if command.program == "exit" and command.is_certain:
                break
            for name, text in command.assignments.items() if not command.words else ():
                if name not in changing and not self.reads_settings:
                    # A value can double its length with each assignment.
                    values[name] = resolved(values, text)[:4_000]
        return commands

    @cached_property
    def training(self) -> list[Command]:
        """The commands that certainly run and train: if any command has a launcher, only those with one."""
        training = [command for command in self.commands if command.trains]
        training = [command for command in training if command.launchers] or training
        return [command for command in training if command.is_certain]

    def count(self, text: str | None, command: Command) -> int | None:
        """Returns the number that a text in a command means; None if it is unknown."""
        value = resolved(command.values, text or "").replace(LITERAL, "$")
        if value.strip("${}") in ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"):
            value = self.directives.get("nodes", "")
        return int(value) if re.fullmatch(r"[0-9]{1,9}", value) else None

    def machines(self, command: Command) -> int | None:
        """Returns on how many machines a command starts, or would start with a launcher; None if it is unknown."""
        own, total = command.option("srun", "--nodes", "-N"), command.option("srun", "--ntasks", "-n")
        if self.scheduler == "pbs":
            chunks = self.directives.get("select", self.directives.get("nodes", "1"))
            return sum(int(number or 1) for number in re.findall(r"(?:^|\+)([0-9]{0,9})", chunks))
        if self.scheduler != "slurm" or "hetjob" in self.text or command.is_open("srun"):
            return None
        if own is None and "nodes" not in self.directives:
            return 1 if (total or self.directives.get("ntasks", "1")) == "1" else None
        machines = self.count(own or self.directives["nodes"], command)
        if own or total is None:
            return machines
        return min(machines, tasks) if machines and (tasks := self.count(total, command)) else None

    def tasks_per_machine(self, command: Command) -> int | None:
        """Returns how many tasks srun or pbsdsh starts on each machine; None if it is unknown."""
        if self.scheduler == "pbs":
            found = re.fullmatch(r"[^+]*(?:mpiprocs|ppn)=([0-9]+)[^+]*", self.directives.get("select", ""))
            return int(found[1]) if found else None
        total = command.option("srun", "--ntasks", "-n") or self.directives.get("ntasks")
        per_machine = command.option("srun", "--ntasks-per-node") or self.directives.get("ntasks-per-node")
        if total is None or per_machine is not None:
            return None if total else self.count(per_machine or "1", command)
        machines, tasks = self.machines(command), self.count(total, command)
        return max(tasks // machines, 1) if machines and tasks else None


def _options(text: str, scheduler: str) -> Iterator[tuple[str, str]]:
    """Yields the names and values of the options in a directive; for `-l` of PBS, those of the resources."""
    text = re.sub(r"\s#.*", "", text) if scheduler == "slurm" else text
    for long, short, value in re.findall(r"(?<!\S)(?:--([\w-]+)|-(\w))[= ]?\s*(\"[^\"]*\"|'[^']*'|[^\s-]\S*)?", text):
        if scheduler == "pbs" and short == "l":
            yield from (part.partition("=")[::2] for part in re.split(r",(?=[a-z_]+=)", value))
        else:
            yield _LONG_NAMES.get(long or short, long or short), value.strip("\"'")


def resolved(values: Mapping[str, str], text: str) -> str:
    """Returns a text with the known values of the variables that the job script expands in it."""
    return re.sub(_VARIABLE, lambda match: values.get(match[1] or match[2], match[0]), text)


def _inner(command: Command) -> list[Command]:
    """Returns the commands in the text of `bash -c TEXT`; none if there is no such text."""
    words = command.words
    for i, (shell, option, text) in enumerate(zip(words, words[1:], words[2:], strict=False)):
        if name_of(shell) in ("bash", "sh", "zsh") and re.fullmatch("-[a-z]*c", option):
            inner_commands = parse(resolved(command.values, text), is_nested=True)
            return [
                replace(
                    command,
                    words=(*words[:i], *inner.words) if inner.words else (),
                    assignments=inner.assignments,
                    is_certain=command.is_certain and inner.is_certain,
                    is_nested=True,
                )
                for inner in inner_commands
            ]
    return []
