"""The command `list`: prints the runs of a root. Does not import torch."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rankzero.cli.command_line import run_command
from rankzero.cli.flags import Flag, file_path, positive_int
from rankzero.jobs.queue import may_change_status, states_of, status_with_job
from rankzero.jobs.record import Record, array_indices, recorded_jobs, submitted_at
from rankzero.messages import Exit, RequestError, print_line
from rankzero.runs.directory import expanded
from rankzero.runs.recorded_run import (
    ARCHIVED_NAME,
    UNKNOWN,
    WAITING,
    RecordedRun,
    Status,
    read_run,
    status_of,
    with_live_values,
)
from rankzero.show.run_list import ListedRun, as_json, print_list, runs_in, why_not_listed

DEFAULT_COUNT = 50

LIST_FLAGS = (
    Flag("root", "DIR", file_path, "list the runs in DIR [runs]", "runs", default="runs"),
    Flag("last", "N", positive_int, f"list the N runs that were started last [{DEFAULT_COUNT}]", "20"),
    Flag("all", "", file_path, "list all runs, also those that --resume never has archived (NAME.before-1)", ""),
    Flag("json", "", file_path, "print JSON for scripts, with all metrics", ""),
)

EXAMPLES = ("python launch/list.py", "python launch/list.py --root runs --last 10 --json")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments, by default `sys.argv[1:]`, and returns its exit code."""
    title = "python launch/list.py: list runs, the one started last at the end (defaults are in brackets)"
    return run_command("list", title, LIST_FLAGS, EXAMPLES, _list, arguments)


def _list(values: Mapping[str, Any], positional: Sequence[str]) -> int:
    if positional:
        word = positional[0]
        instead = f"python launch/list.py --root {word}" if Path(word).is_dir() else "python launch/list.py --help"
        raise RequestError(word, "unexpected argument; list has only flags", instead)
    root = expanded(values["root"])
    count = values["last"] or (sys.maxsize if values["all"] else DEFAULT_COUNT)
    try:
        runs = runs_in(root)
        jobs = recorded_jobs(root)
    except OSError as error:
        found = why_not_listed(root, error)
        raise RequestError(f"--root {root}", found, "--root DIR, where DIR contains runs") from None
    wanted = [(modified, path) for modified, path in runs if values["all"] or not ARCHIVED_NAME.fullmatch(path.name)]
    archived, older = len(runs) - len(wanted), max(0, len(wanted) - count)
    listed = _with_jobs([_listed(path, modified) for modified, path in wanted[older:]], jobs, root)
    if values["json"]:
        print_line(json.dumps([as_json(entry) for entry in listed], indent=2))
        return Exit.FINISHED
    hidden = [f"{older:,} older"] * bool(older) + [f"{archived:,} archived"] * bool(archived)
    omitted = ""
    if hidden:
        verb, pronoun = ("run is", "it") if older + archived == 1 else ("runs are", "them")
        omitted = f"{' and '.join(hidden)} {verb} not listed{f'; --all lists {pronoun}' * (not values['all'])}"
    if listed:
        print_list(listed, root, omitted)
    else:
        print_line(f"{root} contains no runs" + (f"; {omitted}" if omitted else ""))
    return Exit.FINISHED


def _listed(path: Path, modified: float) -> ListedRun:
    run = read_run(path)
    return ListedRun(with_live_values(run), status_of(run), modified if run.started is None else run.started)


def _with_jobs(listed: list[ListedRun], jobs: dict[str, Record], root: Path) -> list[ListedRun]:
    """Returns the runs with their status by their jobs, and jobs whose run has not begun; sorted by start."""
    names = {entry.run.name for entry in listed}
    own = {name: record for name, record in jobs.items() if record.array is None}
    not_begun = {
        name: record
        for name, record in jobs.items()
        if not (root / name).exists()
        and (record.array is None or any(not (root / f"{name}-{i}").exists() for i in array_indices(record.array)))
    }
    begun = {
        entry.run.name: own[entry.run.name]
        for entry in listed
        if entry.run.name in own and may_change_status(entry.run, entry.status, own[entry.run.name])
    }
    asked = [*begun.values(), *not_begun.values()]
    states = states_of(sorted(asked, key=lambda record: submitted_at(root, record), reverse=True)) if asked else {}
    rows = [
        replace(entry, status=status_with_job(entry.run, entry.status, begun[entry.run.name], states))
        if entry.run.name in begun
        else entry
        for entry in listed
    ]
    for name, record in not_begun.items():
        run = RecordedRun(root / name)
        status = status_with_job(run, Status(UNKNOWN), record, states)
        if name not in names and (record.array is None or status.word == WAITING):
            rows.append(ListedRun(run, status, submitted_at(root, record)))
    return sorted(rows, key=lambda entry: (entry.started, entry.run.name))
