"""One finding in a user's job script. Does not import torch."""

from typing import NamedTuple

WRONG, RISKY = "wrong", "risky"


class Finding(NamedTuple):
    """A finding.

    Args:
        line: Number of the line, from 1.
        level: `WRONG` if the job fails, hangs or wastes its machines; `RISKY` if that depends on the site or on chance.
        found: What is wrong or risky, and why.
        instead: What to write instead.
    """

    line: int
    level: str
    found: str
    instead: str
