"""Command lines and environments of ancestor processes, for facts that no variable states."""

import os
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

_GENERATIONS = 8


def ancestor_commands() -> Iterator[list[str]]:
    """Yields the command-line arguments of each ancestor, parent first; ends at the first that cannot be read."""
    for pid in ancestor_ids():
        try:
            yield command_of(pid)
        except OSError:
            return


def ancestor_ids() -> Iterator[str]:
    """Yields the process ids of up to `_GENERATIONS` ancestors, parent first; ends at the first that cannot be read."""
    pid = str(os.getppid())
    for _ in range(_GENERATIONS):
        yield pid
        try:
            parent = re.search(r"^PPid:\s*(\d+)", Path(f"/proc/{pid}/status").read_text(errors="replace"), re.MULTILINE)
        except OSError:
            return
        pid = parent[1] if parent else "0"


def command_of(pid: str) -> list[str]:
    """Returns the command-line arguments of a process.

    Raises:
        OSError: The command line cannot be read.
    """
    return Path(f"/proc/{pid}/cmdline").read_text(errors="surrogateescape").split("\0")


def environment_of(pid: str) -> dict[str, str]:
    """Returns the environment that a process was started with, without later changes.

    Raises:
        OSError: The environment cannot be read.
    """
    text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="surrogateescape")
    return dict(line.split("=", 1) for line in text.split("\0") if "=" in line)


def option(arguments: list[str], name: str) -> str | None:
    """Returns an option's value from a command line: `--name value` or `--name=value`, also with underscores."""
    for argument, next_argument in pairwise([*arguments, ""]):
        flag, equals, value = argument.partition("=")
        if flag.replace("_", "-") == f"--{name}":
            return value if equals else next_argument
    return None
