"""What a person is told; that nobody can hear it is no reason to fail. Imports no torch.

A full disk, a closed pipe or a dead terminal may be behind stdout and stderr.
"""

import contextlib
import os
import sys

_LOST = (OSError, ValueError)


def say(text: str, above: str = "") -> None:
    """Prints a line on stderr: what goes wrong or is about to end. `above` goes before it, as it is."""
    with contextlib.suppress(*_LOST):
        # Text and newline in one write: ranks share a pipe, and unbuffered Python writes print's newline separately.
        print(f"{above}rankzero: {text}\n", end="", file=sys.stderr, flush=True)


def show(text: str) -> None:
    """Prints on stdout: how a run goes, and what came of it."""
    with contextlib.suppress(*_LOST):
        print(f"{text}\n", end="", flush=True)


def settle() -> None:
    """To be called last: what could not be written would make an exit code of its own of it."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None where a shell has closed it
        try:
            stream.flush()
        except _LOST:
            with contextlib.suppress(*_LOST):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
