"""Decides which rank reports that a run cannot start."""

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

from typing_extensions import override

from rankzero.distributed.stop_and_failure.channel import ControlChannel
from rankzero.messages import CannotStart


class Reporter(NamedTuple):
    """The rank that reports a refusal."""

    rank: int
    name: str
    summary: str


class RankRefusal(CannotStart):
    """The refusal of one rank."""

    def __init__(self, name: str, text: str, reason: str) -> None:
        super().__init__(name, text, reason)
        self.name, self.text, self.reason = name, text, reason

    def __str__(self) -> str:
        return f"  {self.name}:\n{self.text}"

    @property
    @override
    def summary(self) -> str:
        return f"{self.name} cannot start: {self.reason}"


@dataclass
class Outcomes:
    """How a piece of work ended on all ranks.

    Args:
        refusals: Text of each refusal -> the lowest rank with this text.
        all_refuse: Whether all ranks refuse.
        failed_name: Name of the lowest rank on which the work failed with another error; empty if there is none.
        failure: The error of that rank.
    """

    refusals: dict[str, Reporter]
    all_refuse: bool
    failed_name: str
    failure: str

    @classmethod
    def of(cls, outcomes: Sequence[Mapping[str, str]], name_of: Callable[[int], str]) -> "Outcomes":
        """Summarizes the outcomes of all ranks.

        Args:
            outcomes: By rank: `refused` or `failed` -> text of the error, and `summary` -> a refusal in one line; empty
                after success.
            name_of: Returns the name of a rank for messages.
        """
        refusals: dict[str, Reporter] = {}
        for rank, outcome in enumerate(outcomes):
            if text := outcome.get("refused"):
                refusals.setdefault(text, Reporter(rank, name_of(rank), outcome["summary"]))
        failed = next((rank for rank, outcome in enumerate(outcomes) if "failed" in outcome), None)
        name, failure = ("", "") if failed is None else (name_of(failed), outcomes[failed]["failed"])
        return cls(refusals, all("refused" in outcome for outcome in outcomes), name, failure)

    def refusal(self, own_error: CannotStart | None, own_rank: int) -> CannotStart:
        """Returns the refusal that this rank raises: its own, or the first one by rank.

        Of several ranks with the same refusal, the lowest reports it.
        """
        text = str(own_error) if own_error else next(iter(self.refusals))
        reporter = Reporter(*self.refusals[text])
        is_reporter = own_error is not None and own_rank == reporter.rank
        if own_error and is_reporter and not self.all_refuse:
            named = RankRefusal(reporter.name, text, own_error.summary)
            named.reported_elsewhere = False
            return named
        refusal = own_error or RankRefusal(reporter.name, text, reporter.summary)
        refusal.reported_elsewhere = not is_reporter
        refusal.is_remote = not is_reporter and _is_remote(reporter.name)
        return refusal


def choose_reporter(refusal: CannotStart, channel: ControlChannel) -> None:
    """Notes in a refusal whether another rank reports the same text; the first rank that calls this reports it."""
    digest, own_name = sha256(str(refusal).encode()).hexdigest(), channel.world.name_of(channel.rank)
    reporter = channel.refusals(digest).get(digest, own_name)
    refusal.reported_elsewhere = reporter != own_name
    refusal.is_remote = _is_remote(reporter)


def refusal_reported_by(name: str) -> CannotStart:
    """Returns a refusal that the rank with this name reports."""
    refusal = RankRefusal(name, "  see its output", "see its output")
    refusal.reported_elsewhere, refusal.is_remote = True, _is_remote(name)
    return refusal


def _is_remote(name: str) -> bool:
    """Returns whether the rank with this name is on another machine."""
    return not name.endswith(f" on {socket.gethostname()}")
