"""The command `submit`: writes the script of a job, submits it, and watches, stops or resumes it."""

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rankzero.cli.command_line import CommandLine, exit_code_of
from rankzero.commands.fit import FIT
from rankzero.jobs.follow import LogReader, follow, is_finished, run_result
from rankzero.jobs.job_request import job_request, read_site
from rankzero.jobs.options import FORMS, QUEUING, help_text, parse
from rankzero.jobs.record import Record, array_indices, member_records, read_record, recorded_jobs
from rankzero.jobs.schedulers import job_state
from rankzero.jobs.schedulers.kubernetes import log_command
from rankzero.jobs.script import log_path, render, script_path
from rankzero.jobs.submission import resubmit, stop, submit
from rankzero.jobs.validation import check_fit_arguments, check_syntax, check_with_fit, program
from rankzero.messages import Exit, RequestError, few, nearest, print_line, print_text, similar_names, spelled

ACTIONS = ("status", "log", "stop", "resume")
"""First arguments that act on the job of a run."""

_SYNONYMS = {"logs": "log", "tail": "log", "cancel": "stop", "kill": "stop", "state": "status", "restart": "resume"}
"""Other names of actions -> the action to type."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments, by default `sys.argv[1:]`, and returns its exit code."""
    return exit_code_of(lambda: _run(sys.argv[1:] if arguments is None else arguments))


def _run(arguments: Sequence[str]) -> int:
    action = arguments[0] if arguments and arguments[0] in ACTIONS else None
    command_line = parse(arguments[1:] if action else arguments)
    if "help" in command_line.values:
        print_line(help_text())
        return Exit.FINISHED
    if "check" in command_line.values:
        return _check(action, command_line)
    return _act(action, command_line) if action else _submit(command_line)


def _submit(command_line: CommandLine) -> int:
    """Submits a job, or prints its script."""
    if command_line.positional:
        raise _unexpected(command_line.positional)
    request, folder = job_request(command_line), working_folder()
    root = folder / request.root
    check_fit_arguments(request, root, FIT)
    command = program(request, folder)
    text = render(request, command, folder)
    if request.setup or request.extra:
        check_syntax(text)
    if "validate" in command_line.values:
        if request.image is not None:
            raise RequestError("--validate with --image", "an image is not started here", "leave --validate out")
        check_with_fit(request, command)
    if "dry_run" in command_line.values:
        print_text(text)
        return Exit.FINISHED
    if "follow" in command_line.values:
        _require_log(request.scheduler, request.name, "--follow")
    reader = LogReader(root, request.name, request.array is not None)
    record = submit(request, text, folder)
    _report(record, root)
    if request.scheduler in QUEUING and not request.gpus_per_device and not re.search("gpu|gres", str(request.extra)):
        print_line("  no GPU is requested; --gpus_per_device 1 requests one for each process")
    if is_finished(root / request.name):
        print_line("  the run is finished; this job trains only if its arguments request more steps or epochs")
    return _finish(record, root, reader, command_line)


def _unexpected(words: Sequence[str]) -> RequestError:
    """Returns the error for arguments without a flag that do not begin with an action."""
    word = words[0]
    action = next(iter([_SYNONYMS[word]] if word in _SYNONYMS else similar_names(word, ACTIONS, 1, 0.75)), None)
    if action:
        instead = f"python launch/submit.py {action} {words[1] if len(words) > 1 else 'NAME'}"
    else:
        instead = f"--scheduler {word}" if word in FORMS else f"leave {word} out, or quote a value that contains spaces"
    found = f"unexpected argument; the actions are {', '.join(ACTIONS)}; arguments of fit.py come after --"
    return RequestError(word, found, instead)


def _check(action: str | None, command_line: CommandLine) -> int:
    """Prints what is wrong in a user's own job script."""
    from rankzero.jobs.check.checker import check, read_script, report  # only this needs the rules

    path = command_line.values["check"]
    if action or command_line != CommandLine({"check": path}, []):
        raise RequestError(f"--check {path}", "--check accepts no other argument", f"--check {shlex.quote(path)}")
    findings = check(read_script(path))
    print_text(report(path, findings) + "\n")
    return Exit.FAILED if findings else Exit.FINISHED


def _act(action: str, command_line: CommandLine) -> int:
    """Prints the state or the log of a job, stops it, or resumes it."""
    names = [*command_line.positional, *filter(None, [command_line.values.get("name")])]
    accepted = ["--root", "--site", *(["--follow"] if action in ("log", "resume") else [])]
    other = [f"--{name}" for name in command_line.values if name != "name"]
    other = [flag for flag in other if flag not in accepted] + ["--"] * (command_line.rest is not None)
    if len(names) != 1 or other:
        found = f"expected the name of one run, and at most {', '.join(accepted)}"
        found += "; to resume with other options, submit the run again" if action == "resume" and other else ""
        instead = f"python launch/submit.py {action} {names[0] if names else 'NAME'}"
        raise RequestError(" ".join([action, *names, *other]), found, instead)
    given = command_line.values
    root = working_folder() / (given.get("root") or read_site(given.get("site")).get("root", "runs"))
    if (record := read_record(root, names[0])) is None:
        raise _unknown_run(action, names[0], root)
    if action == "log" or "follow" in given:
        _require_log(record.scheduler, record.name, action)
    if action == "log":
        reader = LogReader(root, record.name, record.array is not None, skip=False)
        print_text(reader.read() or f"{record.name}: job {record.id} has no output yet\n")
        return _finish(record, root, reader, command_line)
    if action == "resume":
        if all(is_finished(root / member.name) for member in member_records(record)):
            found = "the run is finished"
            raise RequestError(f"resume {record.name}", found, "submit it again with more epochs, or another --name")
        reader = LogReader(root, record.name, record.array is not None)
        record = resubmit(root, record)
        _report(record, root)
        return _finish(record, root, reader, command_line)
    state = job_state(record)
    line = f"{record.name}: job {record.id} ({record.scheduler}): {state}"
    if action == "stop" and state.is_active is not False:
        stop(root, record)
        print_line(f"{record.name}: SIGTERM sent to job {record.id}; a run that has begun saves a checkpoint and stops")
    elif action == "stop":
        print_line(f"{line}; nothing to stop")
    else:
        has_result = state.is_active is False and (record.scheduler != "kubernetes" or (root / record.name).is_dir())
        print_line(f"{line}; {run_result(root, record, state)}" if has_result else line)
    return Exit.FAILED if state.is_active is None and action == "status" else Exit.FINISHED


def _require_log(scheduler: str, name: str, asked: str) -> None:
    """Raises an error if the output of a job is not in a file."""
    if scheduler == "kubernetes":
        raise RequestError(f"{asked} of run {name}", "Kubernetes keeps the output of the pods", log_command(name))


def _unknown_run(action: str, name: str, root: Path) -> RequestError:
    """Returns the error for a run without a job in this folder."""
    known = recorded_jobs(root)
    array, _, index = name.rpartition("-")
    indices = known[array].array if array in known else None
    if indices is not None and index in map(str, array_indices(indices)):
        found = f"member {index} of the job array {array}, which is job {known[array].id}"
        return RequestError(f"{action} {name}", found, _command(action, known[array], root))
    found = f"no run of this name was submitted from {root}; submitted runs: {few([*known]) or 'none'}"
    similar = nearest(name, known)
    instead = _command(action, known[similar], root) if similar else "--root DIR, where DIR contains submitted runs"
    return RequestError(f"{action} {name}", found, instead)


def _finish(record: Record, root: Path, reader: LogReader, command_line: CommandLine) -> int:
    """Follows the job, if this was requested, and returns the exit code."""
    if "follow" in command_line.values:
        return follow(root, record, reader, _command("stop", record, root))
    reader.close()
    return Exit.FINISHED


def working_folder() -> Path:
    """Returns the current folder.

    Raises:
        RequestError: It was deleted.
    """
    try:
        return Path.cwd()
    except OSError:
        raise RequestError("to run in the current folder", "it was deleted", "cd to another folder") from None


def _report(record: Record, root: Path) -> None:
    """Prints the job's id and the commands to watch, stop and resume it."""
    form = f", {record.form}" if record.form else ""
    log = log_path(root, record.name) if record.array is None else root / f"{record.name}.job-INDEX.log"
    rows = {
        "script": shlex.quote(str(script_path(root, record.name, record.scheduler))),
        "log": shlex.quote(str(log)),
        "watch": _command("log", record, root) + " --follow",
        "state": _command("status", record, root),
        "stop": _command("stop", record, root),
        "resume": _command("resume", record, root),
    }
    if record.scheduler == "kubernetes":
        rows = {key: text for key, text in rows.items() if key != "log"} | {"watch": log_command(record.name)}
    lines = [f"rankzero: submitted run {record.name} as job {record.id} ({record.scheduler}{form})"]
    print_line("\n".join([*lines, *(f"  {label:<7} {text}" for label, text in rows.items())]))


def _command(action: str, record: Record, root: Path) -> str:
    """Returns the command line of an action, as this user would type it."""
    script = sys.argv[0] if Path(sys.argv[0]).name == "submit.py" else "launch/submit.py"
    options = "" if root == Path.cwd() / "runs" else f" --root {shlex.quote(str(root))}"
    return spelled(f"python {shlex.quote(script)} {action} {record.name}{options}")
