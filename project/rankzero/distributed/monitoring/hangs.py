"""What each rank reports about itself, from which rank zero notices a hang or a slow rank, and names the cause.

In data-parallel training, a rank that makes no progress stops all other ranks in a collective that waits for it. So
the cause is the rank that makes no progress and waits for no other rank.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from time import monotonic
from typing import Any, NamedTuple

from rankzero.distributed.monitoring.activity import SANITY_CHECK, START, place_of_step
from rankzero.distributed.timers import TIMERS

PATIENCE = 5
"""Factor on the time limit of a phase that may take long, such as a checkpoint, a compilation or a first step.

With the default time limit of 5 minutes, this is less than torch's time limit for a collective of gloo (30 minutes).
"""

BLOCKED = "its Python interpreter is blocked or suspended"
"""Why a connected rank does not report."""

MAX_NAMED_RANKS = 4
"""How many ranks a message names; the others are counted."""

MAX_SHOWN_VALUES = 8
"""How many different values of one property, or different errors, a message shows."""

MAX_NAMED_RANGES = 16
"""How many ranges of consecutive ranks a message names."""

SLOW_FACTOR = 1.5
"""A rank is slow if it takes at least this multiple of the median of all ranks."""

SLOW_SECONDS = 1e-3
"""A rank is slow only if it takes at least this much longer than the median; shorter differences are noise."""

PERSISTENCE_SECONDS = 10.0
"""How long a rank has to be slow before it is reported."""


class PauseDetector:
    """Notices that this process was stopped and runs again (Ctrl-Z, `scontrol suspend`).

    Time before the end of a pause must not count towards a hang.
    """

    def __init__(self) -> None:
        self._resumed_at, self._last_call = 0.0, monotonic()

    def resumed_at(self) -> float:
        """Returns when the last pause ended, by `time.monotonic`; 0 without a pause. Call this with every heartbeat."""
        now = monotonic()
        if now - self._last_call > TIMERS.suspended:
            self._resumed_at = now
        self._last_call = now
        return self._resumed_at


_MAX_NUMBER = 1e15
"""Limit of the numbers in a message; larger ones, and NaN, are malformed."""


class Status(NamedTuple):
    """The state of a rank's main thread.

    Args:
        step: Number of completed optimizer steps.
        phase: The phase of the main thread, see `activity.py`.
        age: Seconds since the main thread entered the phase, or completed the last part of it.
        limit: Seconds that the phase may take; None without limit.
        may_take_longer: Whether the phase may take several times `limit` while no other rank waits for this one.
        waits_in: The collective in which this rank waits for other ranks; empty if there is none.
        sequence: Number of that collective, counted from the start of the run; 0 if it is unknown.
        position: The innermost line of the user's code; empty if it is unknown.
        first_gradient: Seconds from the start of a step to its first gradient; 0 if that is unknown.
    """

    step: int
    phase: str
    age: float
    limit: float | None
    may_take_longer: bool = False
    waits_in: str = ""
    sequence: int = 0
    position: str = ""
    first_gradient: float = 0.0

    @classmethod
    def from_message(cls, values: Any) -> "Status | None":
        """Returns the status in a rank's message; None outside training, and for a malformed message."""
        if not isinstance(values, list) or not _are_types_valid(tuple(map(type, values))):
            return None
        status = cls(*values)
        numbers = (status.step, status.age, status.limit or 0.0, status.sequence, status.first_gradient)
        return status if all(abs(number) < _MAX_NUMBER for number in numbers) else None

    @property
    def is_urgent(self) -> bool:
        """Whether the phase has taken so long that it may become a hang."""
        return self.is_overdue(0.5)

    @property
    def place(self) -> str:
        """Phase and step, such as `data wait at step 812`."""
        return place_of_step(self.phase, self.step)

    def is_overdue(self, factor: float = 1) -> bool:
        """Whether the phase has taken longer than its limit, multiplied by `factor`."""
        return self.limit is not None and self.age > self.limit * factor


@lru_cache(64)  # rank zero receives many messages with the same types
def _are_types_valid(types: tuple[type, ...]) -> bool:
    expected = (int, str, int | float, int | float | None, bool, str, int, str, int | float)
    return len(types) == len(expected) and all(map(issubclass, types, expected))


MAX_REPORTS_PER_SECOND = 20
"""Answers per second that rank zero aims for; in very large runs it receives more."""


def report_interval(nodes: int) -> float:
    """Returns the seconds between two requests of rank zero for reports of all nodes."""
    return min(max(TIMERS.heartbeat, nodes / MAX_REPORTS_PER_SECOND), TIMERS.longest_report_interval)


def silence_seconds(interval: float) -> float:
    """Returns the seconds without a report after which a connected rank counts as blocked."""
    return TIMERS.silence + max(0.0, interval - TIMERS.heartbeat)


class ReportSchedule:
    """Decides whether a status of one rank is reported.

    Rank zero requests all statuses at regular intervals. The answers arrive together, which costs less CPU time than if
    they arrived one by one. A status that may become a hang, and the first one after it, are reported without a
    request, so that large runs, with their long intervals, notice a hang as quickly as small ones.
    """

    def __init__(self) -> None:
        self._was_urgent = False

    def is_due(self, status: Status | None, is_requested: bool) -> bool:
        """Returns whether to report a status (None outside training) now, which rank zero may have requested."""
        is_urgent = status is not None and status.is_urgent
        is_due = is_requested or is_urgent or self._was_urgent
        if is_due:
            self._was_urgent = is_urgent
        return is_due


def describe_hang(statuses: Mapping[int, Status], silent: Mapping[int, float], hosts: Sequence[str]) -> str:
    """Describes the hang of a run; returns an empty string if there is none.

    Args:
        statuses: Status of each rank that is training.
        silent: Seconds since the last report of each connected rank that has stopped reporting.
        hosts: Host of each rank.
    """
    waiting = {rank: status for rank, status in statuses.items() if status.waits_in and rank not in silent}
    working = {rank: status for rank, status in statuses.items() if rank not in waiting}
    is_waiting_too_long = any(status.is_overdue() for status in waiting.values())
    if not working:
        return _describe_waiting(waiting, hosts) if is_waiting_too_long else ""
    causes = [
        rank
        for rank, status in working.items()
        if status.is_overdue(PATIENCE if status.may_take_longer and not is_waiting_too_long else 1)
    ]
    if not causes:
        return ""
    named = [_describe_cause(rank, working[rank], silent, hosts) for rank in causes[:MAX_NAMED_RANKS]]
    uncounted = len(causes) - len(named)
    others = [f"and {uncounted} more rank{'s' * (uncounted > 1)}"] if uncounted else []
    return "; ".join([*named, *others, *_waiting_parts(waiting)])


def _describe_cause(rank: int, status: Status, silent: Mapping[int, float], hosts: Sequence[str]) -> str:
    position = f" ({status.position})" if status.position else ""
    if rank in silent:
        since = f"{status.place}{position}"
        return f"rank {rank} on {hosts[rank]} has not reported for {silent[rank]:.0f} s, since {since}: {BLOCKED}"
    step = "" if status.phase == SANITY_CHECK else f" at step {status.step}"
    return f"rank {rank} on {hosts[rank]} has been in {status.phase} for {status.age:.0f} s{step}{position}"


def _waiting_parts(waiting: Mapping[int, Status]) -> list[str]:
    """Describes the waiting ranks, with one part for each combination of phase, collective and line."""

    def key(rank: int) -> tuple[str, str, str]:
        return waiting[rank].phase, waiting[rank].waits_in, waiting[rank].position

    parts = [
        f"{ranks_text(ranks)} in {phase}, waiting in {collective}" + (f" ({position})" if position else "")
        for (phase, collective, position), ranks in groupby(sorted(waiting, key=lambda rank: (key(rank), rank)), key)
    ]
    others = len(parts) - MAX_NAMED_RANKS
    return [*parts[:MAX_NAMED_RANKS], *([f"others wait at {others} more places"] if others > 0 else [])]


def _describe_waiting(waiting: Mapping[int, Status], hosts: Sequence[str]) -> str:
    """Describes a hang in which every rank that is training waits."""
    parts = "; ".join(_waiting_parts(waiting))
    if others := set(range(len(hosts))) - set(waiting):
        return f"{parts}, for {ranks_text(others)}, which {'is' if len(others) == 1 else 'are'} not training"
    if len({(status.sequence, status.waits_in) for status in waiting.values()}) > 1:
        return f"the ranks wait for one another in different collectives: {parts}"
    age = max(status.age for status in waiting.values())
    names = ", ".join(list(dict.fromkeys(hosts))[:MAX_NAMED_RANKS])
    advice = f"check the network{' and the GPUs' * (' or for a kernel' in parts)} of {names}"
    return f"all ranks have been waiting in the same collective for {age:.0f} s: {parts}; {advice}"


def ranks_text(ranks: Iterable[int]) -> str:
    """Returns ranks as text, such as `rank 3` or `ranks 0-2, 4-7`; of many ranges, the first and a number."""
    ranks = sorted(ranks)
    ranges = [[rank for _, rank in group] for _, group in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0])]
    texts = [str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}" for members in ranges]
    unnamed = sum(len(members) for members in ranges[MAX_NAMED_RANGES:])
    others = f" and {unnamed} more" if unnamed else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(texts[:MAX_NAMED_RANGES])}{others}"


def differences(values: Sequence[Any], hosts: Sequence[str]) -> list[str]:
    """Describes which ranks have which value; an empty list if all have the same."""
    ranks_of: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks_of.setdefault(str(value), []).append(rank)
    if len(ranks_of) < 2:
        return []
    groups = sorted(ranks_of.items(), key=lambda group: (-len(group[1]), group[1]))
    texts = [f"{value} on {describe_ranks(ranks, hosts)}" for value, ranks in groups[:MAX_SHOWN_VALUES]]
    others = len(groups) - len(texts)
    return [*texts, *([f"and {others} other values"] if others else [])]


def describe_ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Returns ranks and their hosts, such as `ranks 2-3 (n2)`."""
    names = list(dict.fromkeys(hosts[rank] for rank in sorted(ranks)))
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more hosts" if len(names) > 3 else "")
    return f"{ranks_text(ranks)} ({shown})"


class HangDetector:
    """Knows the last status of each rank.

    `leader_of` returns the rank that passes on the reports of a rank, or the rank itself.
    """

    def __init__(
        self, hosts: Sequence[str], silence_seconds: float, leader_of: Callable[[int], int] = lambda rank: rank
    ) -> None:
        self.hosts, self.silence_seconds, self._leader_of = hosts, silence_seconds, leader_of
        self._statuses: dict[int, tuple[Status, float]] = {}  # the oldest report first
        self._starting: dict[int, Status] = {}
        self._urgent: set[int] = set()
        self._is_reported = False
        self._pauses = PauseDetector()

    def update(self, rank: int, status: Status | None) -> None:
        """Records the report of a rank; None if the rank is not training."""
        self._statuses.pop(rank, None)
        self._starting.pop(rank, None)
        self._urgent.discard(rank)
        if status is not None and status.phase == START:
            self._starting[rank] = status
        elif status is not None:
            self._statuses[rank] = status, monotonic()
            if status.is_urgent:
                self._urgent.add(rank)

    def new_hang(self) -> str:
        """Returns the description of a hang that has begun since the last call; empty if there is none.

        Must be called with every heartbeat. A hang is described once. If the run makes progress again, the next hang is
        described too.
        """
        now, resumed_at = monotonic(), self._pauses.resumed_at()
        starting = self._starting.values()
        if len(starting) == len(self.hosts) and all(status.waits_in and status.is_overdue() for status in starting):
            is_new, self._is_reported = not self._is_reported, True
            return describe_hang(self._starting, {}, self.hosts) if is_new else ""
        oldest = next((time for _, time in self._statuses.values()), now)
        if not self._urgent and now - max(oldest, resumed_at) <= self.silence_seconds:
            self._is_reported = False
            return ""
        seconds = {rank: now - max(time, resumed_at) for rank, (_, time) in self._statuses.items()}
        silent = {rank: silence for rank, silence in seconds.items() if silence > self.silence_seconds}
        for rank in [rank for rank in silent if self._leader_of(rank) != rank and self._leader_of(rank) in silent]:
            del silent[rank], seconds[rank]  # its reports do not arrive, so its status is unknown
        statuses = {rank: self._statuses[rank][0] for rank in seconds}
        for rank, status in statuses.items():  # as if they made no progress since their reports
            if status.is_urgent or rank in silent:
                older = seconds[rank] if rank in silent else min(seconds[rank], TIMERS.heartbeat)
                statuses[rank] = status._replace(age=status.age + older)
        description = describe_hang(statuses, silent, self.hosts)
        is_new = bool(description) and not self._is_reported
        self._is_reported = bool(description)
        return description if is_new else ""

    def late_start(self) -> str:
        """Returns which rank the others wait for while Lightning prepares data and model; empty if there is none."""
        for rank, status in sorted(self._starting.items()):
            if not status.waits_in:
                position = f" ({status.position})" if status.position else ""
                return f"rank {rank} on {self.hosts[rank]} is preparing data and model{position}"
        return ""

    def last_place(self, rank: int) -> str:
        """Returns phase and step of a rank's last report; empty if the rank was not training."""
        return self._statuses[rank][0].place if rank in self._statuses else ""


class SlowRankDetector:
    """Knows the time to the first gradient of each rank.

    A step takes equally long on all ranks, because all wait for the slowest one. The time from the start of a step to
    the first gradient shows which rank that is.

    Attributes:
        reports: Rank -> description of each rank that has been reported.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts = hosts
        self.reports: dict[int, str] = {}
        self._seconds: dict[int, float] = {}
        self._slow_since: dict[int, float] = {}

    def update(self, rank: int, seconds: float) -> None:
        """Records how long a rank takes from the start of a step to its first gradient; 0 if that is unknown."""
        if seconds:
            self._seconds[rank] = seconds
        else:
            self._seconds.pop(rank, None)

    def new_reports(self) -> list[str]:
        """Returns descriptions of ranks that have become slow since the last call; each rank is described once."""
        now, slow = monotonic(), slow_ranks(self._seconds)
        self._slow_since = {rank: self._slow_since.get(rank, now) for rank in slow}
        persistent = [rank for rank, since in self._slow_since.items() if now - since >= PERSISTENCE_SECONDS]
        new = {rank: self._describe(rank) for rank in persistent if rank not in self.reports}
        self.reports |= new
        unnamed = len(new) - MAX_NAMED_RANKS
        others = [f"{unnamed} more ranks are slow"] if unnamed > 0 else []
        return [*list(new.values())[:MAX_NAMED_RANKS], *others]

    def _describe(self, rank: int) -> str:
        host, others = self.hosts[rank], set(self.hosts) - {self.hosts[rank]}
        advice = f"to exclude the host under Slurm: --exclude={host}" if others else "see which programs run there"
        return (
            f"rank {rank} on {host} is slow: {1e3 * self._seconds[rank]:,.1f} ms from the start of a step to its first "
            f"gradient, and the median of all ranks is {1e3 * _median(self._seconds):,.1f} ms; {advice}"
        )


def slow_ranks(seconds: Mapping[int, float]) -> list[int]:
    """Returns the ranks that take much longer than the median of all ranks.

    Args:
        seconds: Rank -> seconds from the start of a step to the first gradient.
    """
    if len(seconds) < 2:
        return []
    median = _median(seconds)
    limit = max(SLOW_FACTOR * median, median + SLOW_SECONDS)
    return [rank for rank, value in sorted(seconds.items()) if value >= limit]


def _median(seconds: Mapping[int, float]) -> float:
    """Returns the lower median; the module `statistics` would delay the start of every command."""
    return sorted(seconds.values())[(len(seconds) - 1) // 2]
