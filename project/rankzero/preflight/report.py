"""Prints the checks of a preflight one by one, then the verdict, and writes them as JSON."""

import json
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rankzero.messages import Exit, is_quiet, print_error, print_line, spelled
from rankzero.preflight.check import CHECK_NAMES, FAIL, SKIPPED, WARN, Check
from rankzero.runs.checkpoints.atomic_files import write_text


class Report:
    """The checks of one preflight.

    Args:
        prints: Whether this rank prints and writes them.
        file: JSON file, which is written after each check; None for no file.
        thresholds: The thresholds of the checks, for the file.
    """

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
        """Writes all checks; those that have not run yet, or cannot, are `skipped`.

        Args:
            complete: Whether no check follows.
        """
        if not self.prints or self.file is None:
            return
        content = {
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "fit_to_train": complete and not self.names(FAIL),
            "thresholds": self.thresholds,
            "checks": [(self.checks.get(name) or self._skipped(name)).as_json() for name in CHECK_NAMES],
        }
        try:
            write_text(self.file, json.dumps(content, indent=2) + "\n")
        except OSError as error:
            print_error(f"{self.file} could not be written: {error}")
            self.file = None
