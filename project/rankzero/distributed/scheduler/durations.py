"""Durations as schedulers and users write them."""

import re

SAVE_INTERVAL = r"0*([1-9][0-9]{0,8})(steps?|s|min|h)?"
"""Pattern of an interval between checkpoints: `5` (epochs), `200steps`, `90s`, `15min` or `2h`."""

_UNITS = {"s": 1, "min": 60, "h": 3600}


def parse_duration(text: str) -> int:
    """Returns the seconds in a duration, written in a format of Slurm's `--time` or with a unit: `90s`, `15min`, `2h`.

    Slurm's formats are `minutes`, `minutes:seconds`, `hours:minutes:seconds`, `days-hours`, `days-hours:minutes` and
    `days-hours:minutes:seconds`.

    Raises:
        ValueError: The text has none of these formats, or the duration is zero.
    """
    if match := re.fullmatch(r"([0-9]+)(s|min|h)", text):
        seconds = int(match[1]) * _UNITS[match[2]]
    elif match := re.fullmatch(r"(?:([0-9]+)-)?([0-9]+(?::[0-5]?[0-9]){0,2})", text):
        parts = [int(part) for part in match[2].split(":")]
        unit = 3600 if match[1] or len(parts) == 3 else 60
        seconds = int(match[1] or 0) * 86400 + sum(part * unit // 60**i for i, part in enumerate(parts))
    else:
        seconds = 0
    if seconds == 0:
        raise ValueError("a time: 90min, 2h, 90 (minutes), 30:00 (minutes:seconds), 12:00:00 or 1-12:00:00")
    return seconds
