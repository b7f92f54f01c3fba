"""The command `list`: prints the runs of a root. Does not import torch."""

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rankzero.cli.command_line import run_command
from rankzero.cli.flags import Flag, choice, file_path, positive_int
from rankzero.distributed.environments.launch import Launch
from rankzero.jobs.queue import may_change_status, states_of, status_with_job
from rankzero.jobs.record import Record, job_files, member_records, recorded_jobs, submitted_at
from rankzero.messages import Exit, RequestError, few, nearest, print_error, print_line, print_text
from rankzero.runs.directory import expanded
from rankzero.runs.lock import RunLock
from rankzero.runs.recorded_run import (
    RUNNING,
    STATUS_WORDS,
    UNKNOWN,
    WAITING,
    RecordedRun,
    Status,
    read_run,
    status_of,
    with_live_values,
)
from rankzero.show.run_list import ListedRun, as_json, print_list, runs_in, why_not_listed

LIST_FLAGS = (
    Flag("root", "DIR", file_path, "list the runs in DIR [runs]", "runs", default="runs"),
    Flag("last", "N", positive_int, "list the N runs that were started last [50]", "20"),
    Flag("name", "PATTERN", file_path, "list the runs whose names match PATTERN [all]", "'sweep-*'"),
    Flag("status", "WORD", choice(*STATUS_WORDS), f"list the runs that are {', '.join(STATUS_WORDS)} [all]", "failed"),
    Flag("sort", "METRIC", file_path, "sort by METRIC, the best at the end: min:val/loss, max:val/f1 [start]", "loss"),
    Flag("all", "", file_path, "list all runs, also those that --resume never has archived (NAME.before-1)", ""),
    Flag("json", "", file_path, "print JSON for scripts, with all metrics", ""),
    Flag("delete", "", file_path, "ask, then delete the listed runs, with their checkpoints", ""),
)

EXAMPLES = ("python launch/list.py --last 10 --json", "python launch/list.py --name 'sweep-*' --sort min:val/loss")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments, by default `sys.argv[1:]`, and returns its exit code."""
    title = "python launch/list.py: list runs, the one started last at the end (defaults are in brackets)"
    return run_command("list", title, LIST_FLAGS, EXAMPLES, _list, arguments)


def _list(values: Mapping[str, Any], positional: Sequence[str]) -> int:
    if positional:
        word = positional[0]
        instead = f"python launch/list.py --root {word}" if Path(word).is_dir() else "python launch/list.py --help"
        raise RequestError(word, "unexpected argument; list has only flags", instead)
    root, pattern = expanded(values["root"]), values["name"] or "*"
    count, word, order = values["last"] or (sys.maxsize if values["all"] else 50), values["status"], values["sort"]
    try:
        runs = [(modified, path) for modified, path in runs_in(root) if fnmatchcase(path.name, pattern)]
        jobs = {name: job for name, job in recorded_jobs(root).items() if _matches(pattern, job)}
    except OSError as error:
        found = why_not_listed(root, error)
        raise RequestError(f"--root {root}", found, "--root DIR, where DIR contains runs") from None
    wanted = [(modified, path) for modified, path in runs if values["all"] or not RecordedRun(path).is_archived]
    archived, older = len(runs) - len(wanted), max(0, len(wanted) - count)
    listed = _with_jobs([_listed(*run) for run in (wanted if word or order else wanted[older:])], jobs, root)
    if word or order:
        listed = _selected(listed, word, order)
        older = max(0, len(listed) - count)
        listed = listed[older:]
    if values["json"] and values["delete"]:
        raise RequestError("--json --delete", "--delete asks a question, and JSON is for scripts", "--delete")
    if values["json"]:
        print_line(json.dumps([as_json(entry) for entry in listed], indent=2))
        return Exit.FINISHED
    hidden = [f"{older:,} {'other' if order else 'older'}"] * bool(older) + [f"{archived:,} archived"] * bool(archived)
    omitted = ""
    if hidden:
        verb, pronoun = ("run is", "it") if older + archived == 1 else ("runs are", "them")
        omitted = f"{' and '.join(hidden)} {verb} not listed{f'; --all lists {pronoun}' * (not values['all'])}"
    if listed:
        print_list(listed, root, omitted)
        if values["delete"]:
            return _delete([entry for entry in listed if entry.status.word not in (RUNNING, WAITING)], len(listed))
    else:
        such = " such" * bool(values["name"] or word)
        print_line(f"{root} contains no{such} runs" + (f"; {omitted}" if omitted else ""))
    return Exit.FINISHED


def _delete(listed: list[ListedRun], count: int) -> Exit:
    """Asks whether to delete the runs that neither run nor wait, of `count` listed ones, and deletes them."""
    left_out = f"; {count - len(listed)} that run or wait stay" * (count != len(listed))
    if not listed:
        print_line(f"\nnothing to delete{left_out}")
        return Exit.FINISHED
    files = [file for entry in listed for file in entry.run.path.rglob("*") if not file.is_symlink()]
    size = sum(file.stat().st_size for file in files if file.is_file()) / 1e9
    print_text(f"\ndelete {len(listed)} run{'s' * (len(listed) != 1)}, {size:,.1f} GB{left_out}? yes or no: ")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        print_line("nothing was deleted")
        return Exit.FINISHED
    results = [_delete_run(entry.run.path) for entry in listed]
    print_line(f"{results.count('')} deleted")
    for entry, reason in zip(listed, results, strict=True):
        if reason:
            print_error(f"run {entry.run.name} was not deleted: {reason}")
    return Exit.FAILED if any(results) else Exit.FINISHED


def _delete_run(path: Path) -> str:
    """Deletes a run and the files of its job; returns why it cannot be deleted, empty if it was."""
    if path.is_symlink():
        return f"it is a link to {path.readlink()}"
    lock, root = RunLock(Launch(), notify=print_line), path.parent
    try:
        lock.acquire(path)
        deleted = root / f".{path.name}.deleted"  # no start may find a part of it
        path.rename(deleted)
        shutil.rmtree(deleted)
        for file in job_files(root, path.name):
            file.unlink()
    except RequestError as error:
        return error.found
    except OSError as error:
        return str(error)
    finally:
        lock.release()
    return ""


def _selected(listed: list[ListedRun], word: str | None, order: str | None) -> list[ListedRun]:
    """Returns the runs with this status and a value of this metric, the best at the end; None selects all."""
    found = [entry for entry in listed if word in (None, entry.status.word)]
    if order is None:
        return found
    metric = order.removeprefix("min:").removeprefix("max:")
    if (names := {name for entry in found for name in entry.run.metrics}) and metric not in names:
        instead = f"--sort {nearest(metric, names) or min(names)}"
        raise RequestError(f"--sort {order}", f"the runs have only {few(sorted(names), 12)}", instead)
    values = [(entry, entry.run.metrics.get(metric, float("nan"))) for entry in found]
    found = [replace(entry, sorted_by=metric) for entry, value in values if abs(value) >= 0]  # without NaN
    return sorted(found, key=lambda entry: entry.run.metrics[metric], reverse=order.startswith("min:"))


def _listed(modified: float, path: Path) -> ListedRun:
    run = read_run(path)
    return ListedRun(with_live_values(run), status_of(run), modified if run.started is None else run.started)


def _matches(pattern: str, job: Record) -> bool:
    """Returns whether the name of the job's run, or of a run of the job array, matches."""
    return any(fnmatchcase(record.name, pattern) for record in (job, *member_records(job)))


def _with_jobs(listed: list[ListedRun], jobs: dict[str, Record], root: Path) -> list[ListedRun]:
    """Returns the runs with their status by their jobs, and jobs whose run has not begun; sorted by start."""
    names = {entry.run.name for entry in listed}
    own = {name: record for name, record in jobs.items() if record.array is None}
    not_begun = {
        name: record
        for name, record in jobs.items()
        if not (root / name).exists() and not all((root / one.name).exists() for one in member_records(record))
    }
    begun = {
        entry.run.name: own[entry.run.name]
        for entry in listed
        if entry.run.name in own and may_change_status(entry.run, entry.status, own[entry.run.name])
    }
    asked = [*begun.values(), *not_begun.values()]
    states = states_of(sorted(asked, key=lambda record: submitted_at(root, record), reverse=True)) if asked else {}
    rows = []
    for entry in listed:
        job = begun.get(entry.run.name)
        rows.append(replace(entry, status=status_with_job(entry.run, entry.status, job, states)) if job else entry)
    for name, record in not_begun.items():
        run = RecordedRun(root / name)
        status = status_with_job(run, Status(UNKNOWN), record, states)
        if name not in names and (record.array is None or status.word == WAITING):
            rows.append(ListedRun(run, status, submitted_at(root, record)))
    return sorted(rows, key=lambda entry: (entry.started, entry.run.name))
