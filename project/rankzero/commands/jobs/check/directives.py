"""Reads the options of sbatch and qsub in the comments of a job script. Does not import torch."""

import re
import shlex
from collections.abc import Iterator, Sequence
from typing import NamedTuple

PREFIXES = {"slurm": "#SBATCH", "pbs": "#PBS"}
"""Scheduler -> how its directives begin."""

_LONG_NAMES = {
    "A": "account",
    "a": "array",
    "c": "cpus-per-task",
    "D": "chdir",
    "e": "error",
    "G": "gpus",
    "J": "job-name",
    "N": "nodes",
    "n": "ntasks",
    "o": "output",
    "p": "partition",
    "t": "time",
    "tasks-per-node": "ntasks-per-node",
}
"""Short and old names of sbatch's options -> the name for the rules."""


class Directive(NamedTuple):
    """An option of the scheduler in a comment.

    Args:
        line: Number of the line, from 1.
        name: Name without dashes; for a resource of PBS's `-l`, the name of the resource, such as `select`.
        value: The value; empty without one.
    """

    line: int
    name: str
    value: str


def read_directives(lines: Sequence[str], scheduler: str) -> list[Directive]:
    """Returns the directives of a script, including those that the scheduler ignores."""
    prefix = PREFIXES[scheduler]
    return [
        directive
        for number, line in enumerate(lines, 1)
        if re.match(rf"{prefix}\s", line)
        for directive in _of_line(number, line.removeprefix(prefix), scheduler)
    ]


def _of_line(line: int, text: str, scheduler: str) -> Iterator[Directive]:
    """Yields the directives of one line."""
    try:
        words = shlex.split(text, comments=scheduler == "slurm")
    except ValueError:  # a quote without its end
        words = text.split()
    while words:
        word = words.pop(0)
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
        else:
            name, equals, value = word[1:2], "", word[2:].removeprefix("=")
        if not equals and not value and words and not words[0].startswith("-"):
            value = words.pop(0)
        if scheduler == "slurm":
            yield Directive(line, _LONG_NAMES.get(name, name), value)
        elif name == "l":
            for resource in re.split(r",(?=[a-z_]+=)", value):
                key, _, amount = resource.partition("=")
                yield Directive(line, key, amount)
        else:
            yield Directive(line, name, value)
