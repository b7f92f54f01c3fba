"""The command `report`: writes the report of a run, also of a killed one. Does not import torch."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rankzero.checkpoints.atomic_files import write_text
from rankzero.checkpoints.manifest import checkpoints_in
from rankzero.cli.command_line import run_command
from rankzero.cli.flags import Flag, file_path
from rankzero.messages import Exit, RequestError, print_line
from rankzero.runs.directory import RunDirectory, cannot_write_error, expanded
from rankzero.runs.metrics_file import newest_rows
from rankzero.runs.recorded_run import is_run, read_run, status_of, with_live_values
from rankzero.show.report.page import REPORT, render
from rankzero.show.run_list import root_flag, unknown_run_error

REPORT_FLAGS = (Flag("root", "DIR", file_path, "folder of the runs [runs]", "runs", default="runs"),)

EXAMPLES = ("python launch/report.py first", "python launch/report.py first --root runs")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments, by default `sys.argv[1:]`, and returns its exit code."""
    title = "python launch/report.py NAME: write the report of a run, also of a killed one (defaults are in brackets)"
    return run_command("report", title, REPORT_FLAGS, EXAMPLES, _report, arguments)


def _report(values: Mapping[str, Any], names: Sequence[str]) -> int:
    root = expanded(values["root"])
    if len(names) > 1:
        instead = f"python launch/report.py {names[0]}{root_flag(root)}"
        raise RequestError(f"report {' '.join(names)}", "more than one run", instead)
    name = "".join(names)
    path = root / name
    if not (name and is_run(path)):
        raise unknown_run_error(f"report {name}".strip(), name, root, "python launch/report.py {}")
    try:
        write_text(path / REPORT, render(RunDirectory(path), recorded_summary(path)))
    except OSError as error:
        raise cannot_write_error(path, error) from None
    print_line(str(path / REPORT))
    return Exit.FINISHED


def recorded_summary(path: Path) -> dict[str, Any]:
    """Returns the summary of a run; if its newest attempt has none, one of the values that the run has recorded."""
    run, recorded = RunDirectory(path), read_run(path)
    status, attempts = status_of(recorded), len(recorded.attempts)
    if recorded.has_newest_summary and status.word == recorded.summary["status"]:
        return dict(recorded.summary)
    live = with_live_values(recorded)
    environment = run.read(f"attempts/{attempts:04d}/environment.json")
    hosts: dict[str, int] = environment.get("hosts") or {"": 1}
    rows = newest_rows(path)
    ended = rows[-1].seconds if rows else recorded.started or time.time()
    unrecorded: dict[str, Any] = {"epochs": 0, "steps": 0, "samples": 0, "samples_per_second": 0.0, "metrics": {}}
    unrecorded |= {"max_steps": -1, "ledger": [], "slow_ranks": [], "best": None, "can_validate": False}
    return {
        **unrecorded,
        **live.summary,
        "run": run.name,
        "status": status.word,
        "reason": status.note,
        "world_size": sum(hosts.values()),
        "nodes": len(hosts),
        "launcher": environment.get("launcher") or "local",
        "accelerator": str(environment.get("device") or "an unknown device"),
        "seconds": max(0.0, ended - (recorded.started or ended)),
        "attempts": attempts,
        "checkpoint": next((str(saved.relative_to(path)) for saved in checkpoints_in(run.checkpoints)[-1:]), None),
        "max_epochs": live.max_epochs,
    }
