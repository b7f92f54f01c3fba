"""The state of a job, in the words of what started it. Does not import torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class State:
    """The state of a job.

    Args:
        text: The scheduler's own word, such as `RUNNING`, with details; shown to the user.
        is_active: Whether the job waits or runs; None if the scheduler does not answer.
    """

    text: str
    is_active: bool | None
