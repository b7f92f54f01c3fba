"""Command lines of ancestor processes, for facts that no variable states. Does not import torch."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise

import psutil


def ancestor_commands() -> Iterator[list[str]]:
    """Yields the command-line arguments of each ancestor, parent first; ends at the first that cannot be read."""
    with suppress(psutil.Error):
        for process in psutil.Process().parents():
            yield process.cmdline()


def option(arguments: list[str], name: str) -> str | None:
    """Returns an option's value from a command line: `--name value` or `--name=value`, also with underscores."""
    for argument, next_argument in pairwise([*arguments, ""]):
        flag, equals, value = argument.partition("=")
        if flag.replace("_", "-") == f"--{name}":
            return value if equals else next_argument
    return None
