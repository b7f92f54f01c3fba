"""The result of one check, and the report of all of them: printed one by one, and written as JSON."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from rankzero.checkpoints.atomic_files import write_text
from rankzero.distributed.monitoring.hangs import MAX_SHOWN_VALUES, describe_ranks
from rankzero.messages import Exit, is_quiet, print_error, print_line, spelled

if TYPE_CHECKING:
    from rankzero.distributed.coordination.coordinator import Coordinator

T = TypeVar("T")

OK, WARN, FAIL, SKIPPED = "ok", "warn", "fail", "skipped"

CHECK_NAMES = (
    *("launcher", "rendezvous", "environment", "GPUs", "gloo messages", "nccl messages", "collectives", "links"),
    *("run directory", "imports", "data", "loader processes", "training steps"),
)
"""The names of all checks, in order."""

CORRECT = "correct the error shown above"
NETWORK_ADVICE = (
    "check the network and the firewall between the hosts shown above; --interface NAME selects another network"
)


class Check(NamedTuple):
    """The result of a check, which is the same on all ranks: a summary in one line, and details in further lines.

    `name` is one of `CHECK_NAMES`, `status` is `ok`, `warn`, `fail` or `skipped`. `advice` has one line for each
    problem, `values` the measured values for JSON.
    """

    name: str
    status: str
    summary: str
    details: Sequence[str] = ()
    advice: Sequence[str] = ()
    values: Mapping[str, Any] = {}

    @property
    def blocks(self) -> bool:
        """Whether the later checks of the network cannot run, because ranks could not perform this one."""
        return "errors" in self.values

    def lines(self) -> list[str]:
        """Returns the check as text: one line, then its details."""
        return [f"{self.status:<8} {self.name:<16} {self.summary}", *(f"{'':<26}{line}" for line in self.details)]


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
    """Calls `work`, which returns a JSON-serializable value, on every rank. All ranks must call.

    Waits some seconds for the other ranks; by default, as long as a rank may take to load its data.

    Returns:
        The results by rank, None for a rank on which `work` has raised an exception; and the text of the exception of
        each such rank.

    Raises:
        AnotherRankFailed: A rank did not finish its work in time.
    """
    result, error, interrupt = attempt(work)
    answers = coordinator.decide([result, error], list, seconds)
    if interrupt:
        raise interrupt
    return [answer[0] for answer in answers], {rank: answer[1] for rank, answer in enumerate(answers) if answer[1]}


def check_on_rank_zero(coordinator: "Coordinator", own: Any, check: Callable[[list[Any]], Check]) -> Check:
    """Performs a check of the values of all ranks on rank zero; returns it on all ranks. All ranks must call.

    `own` is the JSON-serializable value of this rank. The other ranks receive the result without `values`.
    """
    checks: list[Check] = []

    def choose(values: list[Any]) -> dict[str, Any]:
        checks.append(check(values))
        return checks[0]._replace(values={})._asdict()

    decision = coordinator.decide(own, choose)
    return checks[0] if checks else Check(**decision)


def error_lines(errors: Mapping[int, str], hosts: Sequence[str]) -> list[str]:
    """Describes the errors of ranks: the first line of each different error, and the ranks that have it."""
    ranks_with: dict[str, list[int]] = {}
    for rank, text in errors.items():
        ranks_with.setdefault(text.splitlines()[0], []).append(rank)
    lines = [f"{describe_ranks(ranks, hosts)}: {text}" for text, ranks in ranks_with.items()]
    others = len(lines) - MAX_SHOWN_VALUES
    return [*lines[:MAX_SHOWN_VALUES], *([f"and {others} other errors"] if others > 0 else [])]


def failure(
    name: str, summary: str, errors: Mapping[int, str], hosts: Sequence[str], advice: str = CORRECT, **values: Any
) -> Check:
    """Returns a check that ranks could not perform, with the error of each; `values` are further values for JSON."""
    return Check(name, FAIL, summary, error_lines(errors, hosts), [advice], {**values, "errors": dict(errors)})


class Report:
    """The checks of one preflight: a rank that `prints` also writes them to a JSON file, if any, after each check."""

    def __init__(self, prints: bool, file: Path | None = None, thresholds: Mapping[str, Any] | None = None) -> None:
        self.prints, self.file, self.thresholds = prints, file, dict(thresholds or {})
        self.checks: dict[str, Check] = {}

    def add(self, check: Check) -> Check:
        """Adds and prints a check."""
        self.checks[check.name] = check
        if not is_quiet() or check.status in (WARN, FAIL):
            self._print("\n".join(check.lines()))
        self.write(complete=False)
        return check

    def notify(self, text: str) -> None:
        """Prints a line of a check that is still in progress, unless `--quiet` is set."""
        if not is_quiet():
            self._print(text)

    def _print(self, text: str) -> None:
        if self.prints:
            print_line(spelled(text))

    def verdict(self) -> Exit:
        """Prints the checks that were not run, the verdict and what to do; returns the exit code."""
        failed, warned = self.names(FAIL), self.names(WARN)
        for name in CHECK_NAMES:
            if name not in self.checks:
                self.notify("\n".join(self._skipped(name).lines()))
        text = f"not fit to train: {', '.join(failed)}" if failed else "fit to train"
        if warned:
            text += f"; warnings: {', '.join(warned)}"
        advice = dict.fromkeys(line for check in self.checks.values() for line in check.advice)
        self._print("\n".join([f"verdict: {text}", *(f"  - {line}" for line in advice)]))
        self.write(complete=True)
        return Exit.FAILED if failed else Exit.FINISHED

    @property
    def next_name(self) -> str:
        """The name of the check that follows the last one; after all checks, the last one."""
        last = max((CHECK_NAMES.index(name) for name in self.checks), default=-1)
        return CHECK_NAMES[min(last + 1, len(CHECK_NAMES) - 1)]

    def names(self, status: str) -> list[str]:
        """Returns the names of the checks with this status."""
        return [check.name for check in self.checks.values() if check.status == status]

    def _skipped(self, name: str) -> Check:
        """Returns a check that was not run, with the last failure before it."""
        failed = [other for other in CHECK_NAMES[: CHECK_NAMES.index(name)] if other in self.names(FAIL)]
        return Check(name, SKIPPED, f"{failed[-1]} failed" if failed else "not reached")

    def write(self, complete: bool) -> None:
        """Writes all checks; those that have not run yet, or cannot, are `skipped`."""
        if not self.prints or self.file is None:
            return
        content = {
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "fit_to_train": complete and not self.names(FAIL),
            "thresholds": self.thresholds,
            "checks": [(self.checks.get(name) or self._skipped(name))._asdict() for name in CHECK_NAMES],
        }
        try:
            write_text(self.file, json.dumps(content, indent=2) + "\n")
        except OSError as error:
            print_error(f"{self.file} could not be written: {error}")
            self.file = None
