"""What a person is told by threads that have more important things to do than to be heard. Imports no torch."""

import contextlib
import sys


def say(text: str) -> None:
    """Prints a line on stderr; a full disk, a closed pipe or a dead terminal behind it is no reason to fail."""
    with contextlib.suppress(OSError, ValueError):
        print(f"rankzero: {text}", file=sys.stderr, flush=True)
