"""The result of one check, and its output. Does not import torch."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from rankzero.distributed.coordination.coordinator import Coordinator
from rankzero.distributed.monitoring.diagnosis import MAX_SHOWN_VALUES, describe_ranks

T = TypeVar("T")

OK, WARN, FAIL, SKIPPED = "ok", "warn", "fail", "skipped"

CHECK_NAMES = (
    *("launcher", "rendezvous", "environment", "gloo messages", "nccl messages", "collectives", "links"),
    *("run directory", "imports", "data", "loader processes", "training steps"),
)
"""The names of all checks, in order."""

NETWORK_ADVICE = (
    "check the network and the firewall between the hosts shown above; --interface NAME selects another network"
)


class Check(NamedTuple):
    """The result of a check, which is the same on all ranks.

    Args:
        name: Name of the check, one of `CHECK_NAMES`.
        status: `ok`, `warn`, `fail` or `skipped`.
        summary: The result in one line.
        details: Further lines.
        advice: What to do, one line for each problem.
        values: The measured values, for JSON.
        blocks: Whether the later checks of the network cannot run.
    """

    name: str
    status: str
    summary: str
    details: Sequence[str] = ()
    advice: Sequence[str] = ()
    values: Mapping[str, Any] = {}
    blocks: bool = False

    def lines(self) -> list[str]:
        """Returns the check as text: one line, then its details."""
        return [f"{self.status:<8} {self.name:<16} {self.summary}", *(f"{'':<26}{line}" for line in self.details)]

    def as_json(self) -> dict[str, Any]:
        """Returns the check as an object for JSON."""
        return {
            "name": self.name,
            "status": self.status,
            "summary": self.summary,
            "details": list(self.details),
            "advice": list(self.advice),
            "values": dict(self.values),
        }


def attempt(work: Callable[[], T]) -> tuple[T | None, str, KeyboardInterrupt | None]:
    """Calls `work`; returns its result, the text of its exception, and the exception if it is a KeyboardInterrupt.

    A call of `sys.exit` counts as an exception. The text is empty after success.
    """
    try:
        return work(), "", None
    except (Exception, SystemExit, KeyboardInterrupt) as raised:
        text = f"{type(raised).__name__}: {raised}" if str(raised) else type(raised).__name__
        return None, text, raised if isinstance(raised, KeyboardInterrupt) else None


def gather(
    coordinator: "Coordinator", work: Callable[[], T], seconds: float | None = None
) -> tuple[list[T | None], dict[int, str]]:
    """Calls `work` on every rank. All ranks must call.

    Args:
        coordinator: Exchanges values between all ranks.
        work: Returns a JSON-serializable value.
        seconds: How long to wait for the other ranks; by default, as long as a rank may take to load its data.

    Returns:
        The results by rank, None for a rank on which `work` has raised an exception; and the text of the exception of
        each such rank.

    Raises:
        AnotherRankFailed: A rank did not finish its work in time.
    """
    result, error, interrupt = attempt(work)
    answers = coordinator.all_gather_object([result, error], seconds)
    if interrupt:
        raise interrupt
    return [answer[0] for answer in answers], {rank: answer[1] for rank, answer in enumerate(answers) if answer[1]}


def check_on_rank_zero(coordinator: "Coordinator", own: Any, check: Callable[[list[Any]], Check]) -> Check:
    """Performs a check of the values of all ranks on rank zero; returns it on all ranks. All ranks must call.

    Args:
        coordinator: Exchanges values between all ranks.
        own: The JSON-serializable value of this rank.
        check: Called on rank zero with the values of all ranks, by rank. The other ranks receive the result without
            `values`.
    """
    checks: list[Check] = []

    def choose(values: list[Any]) -> dict[str, Any]:
        checks.append(check(values))
        return checks[0]._replace(values={})._asdict()

    decision = coordinator.decide(own, choose)
    return checks[0] if checks else Check(**decision)


def error_lines(errors: Mapping[int, str], hosts: Sequence[str]) -> list[str]:
    """Describes the errors of ranks: the first line of each different error, and the ranks that have it.

    Args:
        errors: Rank -> text of its exception, see `gather`.
        hosts: Host of each rank.
    """
    ranks_with: dict[str, list[int]] = {}
    for rank, text in errors.items():
        ranks_with.setdefault(text.splitlines()[0], []).append(rank)
    lines = [f"{describe_ranks(ranks, hosts)}: {text}" for text, ranks in ranks_with.items()]
    others = len(lines) - MAX_SHOWN_VALUES
    return [*lines[:MAX_SHOWN_VALUES], *([f"and {others} other errors"] if others > 0 else [])]
