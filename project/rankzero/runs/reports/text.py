"""Short texts for tables: names, numbers, durations. Does not import torch."""

import math
from collections.abc import Sequence

from rich.cells import cell_len

from rankzero.messages import printable_line

_UNITS = (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))
_LARGE = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))

MISSING = "-"
"""Shown in place of a value that is not known."""

NOT_FINITE = "not finite"
"""Shown in place of NaN and infinity, which summaries do not distinguish."""


def shortened(text: str, width: int) -> str:
    """Returns the text in one line of at most `width` printable columns; removes the middle of a longer one."""
    text = printable_line(text)
    if cell_len(text) <= width:
        return text
    if width < 5:
        return _beginning(text, width)
    tail = _beginning(text[::-1], (width - 1) // 2)[::-1]
    return f"{_beginning(text, width - 1 - cell_len(tail))}…{tail}"


def distinct(texts: Sequence[str], width: int, numbers: Sequence[int] = ()) -> list[str]:
    """Returns texts shortened to `width` columns, with a number before each if two of them would be equal."""
    short = [shortened(text, width) for text in texts]
    if len(set(short)) == len(short):
        return short
    pairs = zip(numbers or range(1, len(texts) + 1), texts, strict=True)
    return [f"{number} {shortened(text, width - len(str(number)) - 1)}" for number, text in pairs]


def _beginning(text: str, width: int) -> str:
    """Returns as many characters as fit into `width` columns; some characters need two."""
    end = columns = 0
    while end < len(text) and (columns := columns + cell_len(text[end])) <= width:
        end += 1
    return text[:end]


def age(seconds: float) -> str:
    """Returns a duration in its largest unit, rounded down, such as `3 min`, `2 h` or `5 d`."""
    seconds = max(0.0, seconds)
    unit, size = next((entry for entry in _UNITS if seconds >= entry[1]), _UNITS[-1])
    return f"{int(seconds / size)} {unit}"


def duration(seconds: float | None) -> str:
    """Returns a measured duration in its two largest units, such as `12.5 s`, `5 min 10 s` or `2 h 5 min`."""
    if seconds is None:
        return MISSING
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60:,} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def rough_duration(seconds: float) -> str:
    """Returns an estimated or changing duration as `45 s`, `12 min`, `2 h 05 min` or `3 d 04 h`."""
    if (whole_seconds := round(seconds)) < 60:
        return f"{whole_seconds} s"
    if (minutes := round(seconds / 60)) < 60:
        return f"{minutes} min"
    if (hours := minutes // 60) < 48:
        return f"{hours} h {minutes % 60:02} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24:02} h"


def compact(number: float | None) -> str:
    """Returns a count in at most five characters, such as `460`, `12.3k` or `1.2M`."""
    if number is None:
        return MISSING
    if not math.isfinite(number):
        return "?"
    if number < 9999.5:
        return f"{number:.0f}" if number >= 9.95 or number == int(number) else f"{number:.1f}"
    suffix, size = next((entry for entry in _LARGE if number >= 0.99995 * entry[1]), _LARGE[-1])
    return f"{number / size:.0f}{suffix}" if number >= 99.95 * size else f"{number / size:.1f}{suffix}"


def number_text(value: float | None, digits: int = 4) -> str:
    """Returns a number with `digits` significant digits, or with all its integer digits if it has more.

    With four digits, the results are such as `0.9877`, `3e-07` or `12,345`.
    """
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return NOT_FINITE
    if 1000 <= abs(value) < 1e9:
        decimals = max(0, digits - len(f"{abs(value):.0f}"))
        return f"{value:,.{decimals}f}"
    return f"{value:.{digits}g}"
