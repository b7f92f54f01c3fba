"""Decides from the ranks' reports whether a run hangs, and describes which rank is the cause. Does not import torch.

In data-parallel training one rank that stands still stops all others, in a collective that waits for it. So the cause
is the rank that makes no progress and waits for no other rank.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

PATIENCE = 10
"""Factor on the time limit of work that may take long: a checkpoint, a compiler, a phase that runs the first time."""

SILENCE_SECONDS = 10.0
"""After how long without a report a rank whose connection is open counts as blocked; it reports every 2 seconds."""

NAMED = 4
"""How many ranks a message names; the others are counted."""


class Status(NamedTuple):
    """What a rank reports about itself.

    Args:
        step: Number of completed optimizer steps.
        phase: The phase of the main thread, see `activity.py`.
        age: Seconds since the main thread entered the phase, or since the last part of it.
        limit: Seconds that the phase may take; None without limit.
        is_first: Whether the rank is in this phase for the first time.
        waits_in: The collective that waits for other ranks; empty if there is none.
        sequence: Number of that collective, counted from the start of the run; 0 without one.
        position: The innermost line of the user's code; empty if unknown.
    """

    step: int
    phase: str
    age: float
    limit: float | None
    is_first: bool = False
    waits_in: str = ""
    sequence: int = 0
    position: str = ""

    @classmethod
    def from_message(cls, values: Any) -> "Status | None":
        """Returns the status in a message of a rank; None if the rank sent none, or sent something else."""
        types = [int, str, (int, float), (int, float, type(None)), bool, str, int, str]
        if not isinstance(values, list) or len(values) != len(types):
            return None
        return cls(*values) if all(map(isinstance, values, types)) else None

    def is_overdue(self, patience: float = 1) -> bool:
        """Whether the phase has taken longer than its limit, multiplied by `patience`."""
        return self.limit is not None and self.age > self.limit * patience


def describe_hang(statuses: Mapping[int, Status], silent: Mapping[int, float], hosts: Sequence[str]) -> str:
    """Describes the hang of a run; returns an empty string if there is none.

    Args:
        statuses: Newest status of each rank that takes part in training.
        silent: Seconds since the last report of each rank that reports no more, although it is connected.
        hosts: Host of each rank.
    """
    waiting = {rank: status for rank, status in statuses.items() if status.waits_in and rank not in silent}
    working = {rank: status for rank, status in statuses.items() if rank not in waiting}
    if not working:
        is_overdue = any(status.is_overdue() for status in waiting.values())
        return _describe_waiting(waiting, hosts) if is_overdue else ""
    causes = {rank: status for rank, status in working.items() if _is_stuck(status, silent.get(rank), waiting)}
    if not causes:
        return ""
    parts = [_describe_cause(rank, status, silent, hosts) for rank, status in list(causes.items())[:NAMED]]
    if len(causes) > NAMED:
        parts.append(f"and {len(causes) - NAMED} more ranks")
    return "; ".join([*parts, *_waiting_parts(waiting)])


def _is_stuck(status: Status, silent_seconds: float | None, waiting: Mapping[int, Status]) -> bool:
    if silent_seconds is not None:
        return status._replace(age=status.age + silent_seconds).is_overdue()
    # A long first step of all ranks is a compiler or a cold disk; if other ranks are waiting for this one, it is not.
    return status.is_overdue(PATIENCE if status.is_first and not waiting else 1)


def _describe_cause(rank: int, status: Status, silent: Mapping[int, float], hosts: Sequence[str]) -> str:
    place = f" ({status.position})" if status.position else ""
    if rank in silent:
        return (
            f"rank {rank} on {hosts[rank]} has not reported for {silent[rank]:.0f} s, last in {status.phase} at step "
            f"{status.step}{place}: its Python interpreter is blocked"
        )
    return (
        f"rank {rank} on {hosts[rank]} has been in {status.phase} for {status.age:.0f} s at step {status.step}{place}"
    )


def _waiting_parts(waiting: Mapping[int, Status]) -> list[str]:
    """Describes the ranks that wait, one part for each phase, collective and line."""

    def key(rank: int) -> tuple[str, str, str]:
        return waiting[rank].phase, waiting[rank].waits_in, waiting[rank].position

    return [
        f"{ranks_text(list(ranks))} in {phase}, waiting in {collective}" + (f" ({position})" if position else "")
        for (phase, collective, position), ranks in groupby(sorted(waiting, key=lambda rank: (key(rank), rank)), key)
    ]


def _describe_waiting(waiting: Mapping[int, Status], hosts: Sequence[str]) -> str:
    """Describes a hang in which all ranks wait: for one another, or for the network."""
    parts = "; ".join(_waiting_parts(waiting))
    if len({(status.sequence, status.waits_in) for status in waiting.values()}) > 1:
        return f"the ranks wait for one another in different collectives: {parts}"
    age = max(status.age for status in waiting.values())
    names = ", ".join(dict.fromkeys(hosts))
    return f"all ranks have been waiting in the same collective for {age:.0f} s: {parts}; check the network of {names}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Returns `rank 3`, or `ranks 0-2, 4-7`."""
    runs = [
        [rank for _, rank in group]
        for _, group in groupby(enumerate(sorted(ranks)), key=lambda pair: pair[1] - pair[0])
    ]
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(texts)}"
