"""Reads the values of flags: each reader raises a ValueError that says what would have been right. Imports no torch."""

import re
from collections.abc import Callable

from rankzero.distributed.scheduler.durations import seconds_of

EXPORTS = (".pt", ".safetensors")
"""What the file of `--export` may end in."""


def positive_int(text: str) -> int:
    """Reads a whole number of 1 or more."""
    if not re.fullmatch(r"0*[1-9][0-9]*", text):
        raise ValueError("a whole number of 1 or more")
    return int(text)


def seed_value(text: str) -> int:
    """Reads a whole number that every generator takes for a seed."""
    if not re.fullmatch(r"[0-9]+", text) or int(text) >= 2**32:
        raise ValueError("a whole number from 0 to 4294967295")
    return int(text)


def save_interval(text: str) -> str:
    """Reads how often to save: `5` (epochs), `200steps`, `90s`, `15min` or `2h`."""
    if not re.fullmatch(r"0*[1-9][0-9]*(steps?|s|min|h)?", text):
        raise ValueError("a number of epochs (5), of steps (200steps) or a time (15min, 2h)")
    return text


def metric_to_keep(text: str) -> str:
    """Reads a metric and which way is better: `min:val/loss` or `max:val/accuracy`."""
    if not re.fullmatch(r"(min|max):\S+", text):
        raise ValueError("min:NAME or max:NAME, where NAME is a metric that the model logs")
    return text


def time_limit_value(text: str) -> str:
    """Reads how long the run may take, as Slurm's `--time` has it or with a unit.

    Returns:
        The time in seconds, `5400s`: what was written as `1:30:00` would be read as another number by a YAML reader.
    """
    return f"{seconds_of(text)}s"


def run_name(text: str) -> str:
    """Reads a name that is one folder's name on every file system."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+=@-]{0,127}", text):
        raise ValueError("a folder's name of letters, digits and . _ - + = @ (at most 128, not beginning with . or -)")
    return text


def non_negative_int(text: str) -> int:
    """Reads a whole number of 0 or more."""
    if not re.fullmatch(r"[0-9]+", text):
        raise ValueError("a whole number of 0 or more")
    return int(text)


def port_number(text: str) -> int:
    """Reads a TCP port."""
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 0 < int(text) < 2**16:
        raise ValueError("a port, 1 to 65535")
    return int(text)


def hostname(text: str) -> str:
    """Reads the name of a host or of an interface."""
    if not re.fullmatch(r"[!-~]+", text):
        raise ValueError("a name without blanks")
    return text


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


def choices(*legal: str) -> Callable[[str], str]:
    """Returns a reader of one or more of the `legal` words, with commas between them."""

    def read(text: str) -> str:
        if not set(text.split(",")) <= set(legal):
            raise ValueError("one or more of " + ", ".join(legal) + ", with commas between them")
        return text

    return read


def choice(*legal: str) -> Callable[[str], str]:
    """Returns a reader of one of the `legal` words."""

    def read(text: str) -> str:
        if text not in legal:
            raise ValueError("one of " + ", ".join(legal))
        return text

    return read


def yes_or_no(text: str) -> str:
    """Reads `yes` or `no`, which YAML may have made `True` and `False` of."""
    word = {"true": "yes", "false": "no"}.get(text.lower(), text.lower())
    return choice("yes", "no")(word)


def export_file(text: str) -> str:
    """Reads the path of a file for weights alone."""
    if not file_path(text).endswith(EXPORTS):
        raise ValueError("a file that ends in " + " or ".join(EXPORTS))
    return text
