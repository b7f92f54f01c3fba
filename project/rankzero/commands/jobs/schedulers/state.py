"""The state of a job, as the scheduler reports it. Does not import torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class State:
    """The state of a job.

    Args:
        word: The scheduler's own word, such as `RUNNING`.
        is_active: Whether the job waits or runs; None if the scheduler does not answer.
        details: Further text for the user, such as the nodes.
        has_failed: Whether an ended job has failed or was canceled; None if unknown.
    """

    word: str
    is_active: bool | None
    details: str = ""
    has_failed: bool | None = None

    def __str__(self) -> str:
        """Returns the text for the user."""
        return f"{self.word} {self.details}".rstrip()
