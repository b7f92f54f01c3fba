"""A user's job script, as the rules of the check see it. Does not import torch."""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

from rankzero.commands.jobs.check import values
from rankzero.commands.jobs.check.bash import changing_names, commands_of, functions_of, here_document_lines
from rankzero.commands.jobs.check.command import Command
from rankzero.commands.jobs.check.directives import PREFIXES, Directive, read_directives

_NODE_COUNTS = ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")


class UserScript:
    """A job script.

    Args:
        text: The text of the script.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        inside = here_document_lines(text)
        self.lines = ["" if number in inside else line for number, line in enumerate(text.split("\n"), 1)]

    @cached_property
    def scheduler(self) -> str:
        """`slurm`, `pbs`, or empty for a script without directives."""
        for pattern in ("{}\\s", "\\s*{}\\s"):  # an indented directive is a mistake of its own
            for line in self.lines:
                for scheduler, prefix in PREFIXES.items():
                    if re.match(pattern.format(prefix), line):
                        return scheduler
        return ""

    @cached_property
    def commands(self) -> list[Command]:
        """The commands in their order, with the words of variables such as `$CMD` that the script assigns."""
        known: values.Values = {}
        changing = changing_names(self.text)
        commands = []
        for command in commands_of(self.text):
            commands.append(replace(command, words=values.expanded(known, command.words), values=dict(known)))
            values.assign(known, command, changing)
        return commands

    @cached_property
    def training(self) -> list[Command]:
        """The commands that train: if any has a launcher, only those with one."""
        functions = functions_of(self.text)
        training = [command for command in self.commands if command.trains and command.program not in functions]
        training = [command for command in training if command.launchers] or training
        # A branch for a single machine, such as for debugging, beside a launch on all machines.
        return [command for command in training if not _is_debug_branch(command)] or training

    @cached_property
    def first_command(self) -> int:
        """Number of the line after which schedulers ignore directives."""
        for number, line in enumerate(self.lines, 1):
            if line.strip() and not line.lstrip().startswith("#"):
                return number
        return len(self.lines) + 1

    @cached_property
    def all_directives(self) -> list[Directive]:
        """The directives, including those that the scheduler ignores."""
        return read_directives(self.lines, self.scheduler) if self.scheduler else []

    @cached_property
    def code(self) -> str:
        """The lines without comments and here-documents."""
        return "\n".join(line for line in self.lines if not line.lstrip().startswith("#"))

    def directive(self, *names: str) -> Directive | None:
        """Returns the last directive of one of these names that the scheduler reads; None without one."""
        found = [item for item in self.all_directives if item.line < self.first_command and item.name in names]
        return found[-1] if found else None

    def before(self, command: Command) -> Iterator[Command]:
        """Yields the commands before a command."""
        for other in self.commands:
            if other is command:
                return
            yield other

    def after(self, command: Command) -> list[Command]:
        """Returns the commands after a command."""
        return self.commands[next(i for i, other in enumerate(self.commands) if other is command) + 1 :]

    def resolved(self, text: str, command: Command) -> str:
        """Returns a text in a command, with the values of variables that the script assigns."""
        return values.resolved(command.values, text)

    def count(self, text: str | None, command: Command) -> int | None:
        """Returns the number that a text in a command means; None if it is unknown here."""
        if text is None:
            return None
        value = self.resolved(text, command)
        if re.fullmatch(r"[0-9]{1,9}", value):
            return int(value)
        if value.strip("${}") in _NODE_COUNTS and (nodes := self.directive("nodes")):
            return self.count(nodes.value, command)
        return None


def _is_debug_branch(command: Command) -> bool:
    return command.position.is_conditional and command.option("torchrun", "--standalone") is not None
