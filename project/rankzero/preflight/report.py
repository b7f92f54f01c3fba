"""Prints the checks of a preflight one by one, then the verdict, and writes them as JSON."""

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rankzero.messages import Exit, RequestError, print_error, print_line
from rankzero.preflight.check import FAIL, WARN, Check


class Report:
    """The checks of one preflight.

    Args:
        prints: Whether this rank prints them.
        only_problems: Whether checks without a problem are not printed.
    """

    def __init__(self, prints: bool, only_problems: bool = False) -> None:
        self.prints, self.only_problems = prints, only_problems
        self.checks: list[Check] = []

    def add(self, check: Check) -> Check:
        """Adds and prints a check."""
        self.checks.append(check)
        if not self.only_problems or check.status in (WARN, FAIL):
            self.notify("\n".join(check.lines()))
        return check

    def notify(self, text: str) -> None:
        """Prints a line of a check that is still in progress."""
        if self.prints:
            print_line(text)

    @property
    def has_failed(self) -> bool:
        """Whether a check has failed."""
        return any(check.status == FAIL for check in self.checks)

    def verdict(self) -> Exit:
        """Prints the verdict and what to do; returns the exit code."""
        failed = [check.name for check in self.checks if check.status == FAIL]
        warned = [check.name for check in self.checks if check.status == WARN]
        text = f"not fit to train: {', '.join(failed)}" if failed else "fit to train"
        if warned:
            text += f"; warnings: {', '.join(warned)}"
        advice = list(dict.fromkeys(line for check in self.checks for line in check.advice))
        self.notify("\n".join([f"verdict: {text}", *(f"  - {line}" for line in advice)]))
        return Exit.FAILED if failed else Exit.FINISHED

    def write(self, file: Path, context: dict[str, Any]) -> None:
        """Writes the checks and their thresholds as JSON.

        Args:
            file: The file to write.
            context: Further entries, such as the thresholds.
        """
        content = {
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "fit": not self.has_failed,
            **context,
            "checks": [check.as_json() for check in self.checks],
        }
        try:
            file.write_text(json.dumps(content, indent=2) + "\n")
        except OSError as error:
            print_error(f"{file} could not be written: {error}")


def refuse_differences(check: Check) -> None:
    """Refuses a run whose ranks must not train together.

    Raises:
        RequestError: The check has failed.
    """
    if check.status == FAIL:
        found = "\n".join([check.summary, *check.details])
        advice = "\n".join([*check.advice, "or, if this is intended, --preflight off"])
        raise RequestError("to train with all ranks", found, advice)
