"""One finding in a user's job script. Does not import torch."""

from typing import NamedTuple


class Finding(NamedTuple):
    """A finding.

    Args:
        line: Number of the line, from 1.
        found: Why the job fails, hangs or does not use its machines.
        instead: What to write instead.
    """

    line: int
    found: str
    instead: str
