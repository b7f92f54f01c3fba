"""Readers of flag values: each returns the value, or raises a ValueError that describes valid values.

Does not import torch or jsonargparse; importing jsonargparse takes longer than all parsing in this module.
"""

import contextlib
import re
from collections.abc import Callable
from typing import Any

from rankzero.distributed.scheduler.durations import parse_duration

EXPORTS = (".pt", ".safetensors")
"""Valid suffixes of the file for `--export`."""

Reader = Callable[[str], Any]


def whole_number(minimum: int, maximum: int | None = None) -> Reader:
    """Returns a reader of whole numbers from `minimum` to `maximum`; None means no upper limit."""

    def read(text: str) -> int:
        if (
            not re.fullmatch(r"[0-9]{1,18}", text)
            or int(text) < minimum
            or (maximum is not None and int(text) > maximum)
        ):
            valid_range = f">= {minimum}" if maximum is None else f"from {minimum} to {maximum}"
            raise ValueError(f"a whole number {valid_range}")
        return int(text)

    return read


def text_matching(pattern: str, description: str) -> Reader:
    """Returns a reader of text that matches a regular expression as a whole."""

    def read(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(description)
        return text

    return read


positive_int = whole_number(1)
non_negative_int = whole_number(0)
seed_value = whole_number(0, 2**32 - 1)
port_number = whole_number(1, 2**16 - 1)
hostname = text_matching(r"[!-~]+", "a name without spaces")
save_interval = text_matching(
    r"0*[1-9][0-9]*(steps?|s|min|h)?", "a number of epochs (5), of steps (200steps) or a time (15min, 2h)"
)
profiled_steps = text_matching(
    r"0*([1-9][0-9]{0,2}|1000)steps?(@[0-9]{1,18})?",  # a recording of many steps would fill the memory
    "a number of steps from 1 to 1000 (10steps), or the steps after a given one (10steps@200)",
)
profiled_ranks = text_matching(r"all|[0-9]{1,9}(,[0-9]{1,9})*", "all, or ranks separated by commas (0,1)")
metric_to_keep = text_matching(r"(min|max):\S+", "min:NAME or max:NAME, where NAME is a metric that the model logs")
run_name = text_matching(
    r"[A-Za-z0-9_][A-Za-z0-9_.+=@-]{0,127}",
    "a folder name of letters, digits and . _ - + = @ (at most 128 characters, not starting with . or -)",
)


def time_limit_value(text: str) -> str:
    """Reads a time limit in a format of Slurm's `--time`, or with a unit.

    Returns:
        The time in seconds with its unit, such as `5400s`, because YAML 1.1 reads `1:30:00` as a number.
    """
    return f"{parse_duration(text)}s"


def seconds_value(text: str) -> float:
    """Reads a time: seconds, or a number with a unit (`5min`)."""
    with contextlib.suppress(ValueError):
        seconds = float(text) if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) else float(parse_duration(text))
        if seconds > 0:
            return seconds
    raise ValueError("a time in seconds (300) or with a unit (5min)")


def bandwidth_value(text: str) -> float:
    """Reads a bandwidth in Gbit/s."""
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
        raise ValueError("a number of Gbit/s (0.5, 10)")
    return float(text)


def file_path(text: str) -> str:
    """Reads a path; rejects blank text and NUL characters."""
    if not text.strip() or "\0" in text:
        raise ValueError("a path")
    return text


def resume_value(text: str) -> str:
    """Reads `auto`, `never` or a path; converts `yes`, `no`, and LightningCLI's `last` and `null`."""
    aliases = {"yes": "auto", "last": "auto", "no": "never", "null": "never", "None": "never"}
    return aliases.get(text) or file_path(text)


def checkpoint_value(text: str) -> str:
    """Reads `last`, `best` or a path; converts LightningCLI's `null` to `last`."""
    return "last" if text in ("null", "None") else file_path(text)


def choices(*options: str) -> Reader:
    """Returns a reader of one or more of the `options`, separated by commas."""

    def read(text: str) -> str:
        if not set(text.split(",")) <= set(options):
            raise ValueError("one or more of " + ", ".join(options) + ", separated by commas")
        return text

    return read


def choice(*options: str) -> Reader:
    """Returns a reader of one of the `options`."""

    def read(text: str) -> str:
        if text not in options:
            raise ValueError("one of " + ", ".join(options))
        return text

    return read


def yes_or_no(text: str) -> str:
    """Reads `yes` or `no`, or the `True` or `False` to which YAML converts them."""
    answer = {"true": "yes", "false": "no"}.get(text.lower(), text.lower())
    return str(choice("yes", "no")(answer))


def export_file(text: str) -> str:
    """Reads the path of a file for weights; its suffix must be one of `EXPORTS`."""
    if not file_path(text).endswith(EXPORTS):
        raise ValueError("a file that ends in " + " or ".join(EXPORTS))
    return text
