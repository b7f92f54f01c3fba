"""Readers of flag values: each returns the value, or raises a ValueError that says what would have been right.

Imports neither torch nor jsonargparse, whose import takes longer than all of the parsing here.
"""

import re
from collections.abc import Callable
from typing import Any

from rankzero.distributed.scheduler.durations import seconds_of

EXPORTS = (".pt", ".safetensors")
"""What the file of `--export` may end in."""

Reader = Callable[[str], Any]


def whole_number(least: int, most: int | None = None) -> Reader:
    """Returns a reader of a whole number within limits."""

    def read(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < least or (most is not None and int(text) > most):
            upwards = f"of {least} or more" if most is None else f"from {least} to {most}"
            raise ValueError(f"a whole number {upwards}")
        return int(text)

    return read


def matching(pattern: str, meaning: str) -> Reader:
    """Returns a reader of text that a regular expression matches as a whole.

    Args:
        pattern: The regular expression.
        meaning: What it stands for, for the error message.
    """

    def read(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(meaning)
        return text

    return read


positive_int = whole_number(1)
non_negative_int = whole_number(0)
seed_value = whole_number(0, 2**32 - 1)
port_number = whole_number(1, 2**16 - 1)
hostname = matching(r"[!-~]+", "a name without blanks")
save_interval = matching(
    r"0*[1-9][0-9]*(steps?|s|min|h)?", "a number of epochs (5), of steps (200steps) or a time (15min, 2h)"
)
metric_to_keep = matching(r"(min|max):\S+", "min:NAME or max:NAME, where NAME is a metric that the model logs")
run_name = matching(
    r"[A-Za-z0-9_][A-Za-z0-9_.+=@-]{0,127}",
    "a folder's name of letters, digits and . _ - + = @ (at most 128, not beginning with . or -)",
)


def time_limit_value(text: str) -> str:
    """Reads how long the run may take, as Slurm's `--time` has it or with a unit.

    Returns:
        The time in seconds, `5400s`: YAML readers take `1:30:00` for another number.
    """
    return f"{seconds_of(text)}s"


def file_path(text: str) -> str:
    """Reads a path."""
    if not text.strip() or "\0" in text:
        raise ValueError("a path")
    return text


def resume_from(text: str) -> str:
    """Reads what to resume from: `auto`, `never`, a path, or `last` and `null`, which are LightningCLI's words."""
    return {"last": "auto", "null": "never", "None": "never"}.get(text) or file_path(text)


def checkpoint_of(text: str) -> str:
    """Reads which checkpoint: `last`, `best` or a path; `null` is LightningCLI's word for none in particular."""
    return "last" if text in ("null", "None") else file_path(text)


def choices(*legal: str) -> Reader:
    """Returns a reader of one or more of the `legal` words, with commas between them."""

    def read(text: str) -> str:
        if not set(text.split(",")) <= set(legal):
            raise ValueError("one or more of " + ", ".join(legal) + ", with commas between them")
        return text

    return read


def choice(*legal: str) -> Reader:
    """Returns a reader of one of the `legal` words."""

    def read(text: str) -> str:
        if text not in legal:
            raise ValueError("one of " + ", ".join(legal))
        return text

    return read


def yes_or_no(text: str) -> str:
    """Reads `yes` or `no`, which YAML may have made `True` and `False` of."""
    word = {"true": "yes", "false": "no"}.get(text.lower(), text.lower())
    return str(choice("yes", "no")(word))


def export_file(text: str) -> str:
    """Reads the path of a file for weights alone."""
    if not file_path(text).endswith(EXPORTS):
        raise ValueError("a file that ends in " + " or ".join(EXPORTS))
    return text
