"""The command lines of the processes that started this one, which tell what no variable does. Imports no torch."""

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

_GENERATIONS = 8


def ancestors() -> Iterator[list[str]]:
    """The words of each ancestor's command line, the parent's first; nothing where they cannot be seen."""
    for process in ancestor_ids():
        try:
            yield command_of(process)
        except OSError:
            return


def ancestor_ids() -> Iterator[str]:
    """The process id of each ancestor, the parent's first; nothing where they cannot be seen."""
    process = "self"
    for _ in range(_GENERATIONS):
        try:
            parent = re.search(
                r"^PPid:\s*(\d+)", Path(f"/proc/{process}/status").read_text(errors="replace"), re.MULTILINE
            )
        except OSError:
            return
        process = parent[1] if parent else "0"
        yield process


def command_of(process: str) -> list[str]:
    """The words of a process's command line.

    Raises:
        OSError: It cannot be read.
    """
    return Path(f"/proc/{process}/cmdline").read_text(errors="surrogateescape").split("\0")


def environment_of(process: str) -> dict[str, str]:
    """The variables that a process was started with, without those that it has set since.

    Raises:
        OSError: It cannot be read.
    """
    text = Path(f"/proc/{process}/environ").read_bytes().decode(errors="surrogateescape")
    return dict(line.split("=", 1) for line in text.split("\0") if "=" in line)


def option(words: list[str], name: str) -> str | None:
    """The value of an option on a command line, in the forms `--name value`, `--name=value` and with underscores."""
    for word, following in pairwise([*words, ""]):
        option, equals, value = word.partition("=")
        if option.replace("_", "-") == f"--{name}":
            return value if equals else following
    return None
