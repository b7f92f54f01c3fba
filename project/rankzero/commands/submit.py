"""The command `submit`: writes the script of a job, submits it, and watches, stops or resumes it."""

import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rankzero.cli.arguments import parse_arguments
from rankzero.cli.command import SUBCOMMANDS
from rankzero.commands.fit import FIT
from rankzero.commands.jobs.command_line import CommandLine, job_request, parse
from rankzero.commands.jobs.follow import LogReader, follow
from rankzero.commands.jobs.options import FLAGS, help_text, is_queuing
from rankzero.commands.jobs.record import Record, read_record
from rankzero.commands.jobs.request import JobRequest
from rankzero.commands.jobs.schedulers import slurm
from rankzero.commands.jobs.script import ARRAY_INDEX, fit_arguments, log_path, render, script_path
from rankzero.commands.jobs.submission import check_submission, job_state, resubmit, stop, submit
from rankzero.distributed.process.clean_environment import without_job_variables
from rankzero.distributed.stop_and_failure.error_reporter import refuse
from rankzero.messages import CannotStart, Exit, RequestError, flush_streams, print_line, print_text, spelled

ACTIONS = ("status", "log", "stop", "resume")
"""First argument -> what to do with the job of a run."""

_OTHER_ACTIONS = {
    "logs": "log",
    "tail": "log",
    "cancel": "stop",
    "kill": "stop",
    "state": "status",
    "restart": "resume",
}
"""Other names of actions -> the action to type."""

BEFORE_DASHES = (*FLAGS, "site", "dry_run", "follow")
"""Flags of `submit`; some are flags of `fit` too."""

SET_BY_SCRIPT = ("node_rank", "master_addr", "master_port")
"""Flags of `fit` that the script sets."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments, by default `sys.argv[1:]`, and returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        action = arguments[0] if arguments and arguments[0] in ACTIONS else None
        command_line = parse(arguments[1:] if action else arguments)
        if "help" in command_line.switches:
            print_line(help_text())
            return Exit.FINISHED
        if command_line.check is not None:
            return _check(arguments, command_line.check)
        return _act(action, command_line) if action else _submit(command_line)
    except KeyboardInterrupt:
        return 130
    except CannotStart as error:
        return refuse(error, None)
    finally:
        flush_streams()


def _submit(command_line: CommandLine) -> int:
    """Submits a job, or prints its script."""
    if command_line.positional:
        word = command_line.positional[0]
        action = _OTHER_ACTIONS.get(word)
        found = f"unexpected argument; the actions are {', '.join(ACTIONS)}; arguments of fit.py come after --"
        raise RequestError(word, found, f"python launch/submit.py {action} NAME" if action else f"-- {word}")
    request, folder = job_request(command_line), working_folder()
    root = folder / request.root
    check_fit_arguments(request, root)
    command = program(request, folder)
    text = render(request, command, folder, request.scheduler == "slurm" and slurm.supports_expedite())
    if "dry_run" in command_line.switches:
        print_text(text)
        return Exit.FINISHED
    check_submission(request, root)
    if request.image is None:
        check_with_fit(request, command)
    reader = LogReader(root, request.name, request.array is not None)
    record = submit(request, text, folder)
    _report(record, root)
    if is_queuing(request.scheduler) and not request.gpus_per_device:
        print_line("  no GPU is requested; --gpus_per_device 1 requests one for each process")
    return _finish(record, root, reader, command_line)


def _check(arguments: Sequence[str], path: str) -> int:
    """Prints what is wrong or risky in a user's own job script."""
    from rankzero.commands.jobs.check.checker import check, read_script, report  # only this needs the grammar of bash

    if len(arguments) > 2 or (len(arguments) == 2 and "=" in arguments[0]):
        raise RequestError(shlex.join(arguments), "--check accepts no other argument", f"--check {shlex.quote(path)}")
    findings = check(read_script(path))
    print_text(report(path, findings) + "\n")
    return Exit.FAILED if findings else Exit.FINISHED


def _act(action: str, command_line: CommandLine) -> int:
    """Prints the state or the log of a job, stops it, or resumes it."""
    names = [*command_line.positional, *filter(None, [command_line.values.get("name")])]
    other = [f"--{name}" for name in {*command_line.values, *command_line.switches} - {"name", "root", "follow"}]
    if len(names) != 1 or other or command_line.site or command_line.arguments is not None:
        found = "expected the name of one run, and at most --root DIR and --follow"
        raise RequestError(" ".join([action, *names, *other]), found, f"python launch/submit.py {action} my-run")
    root = working_folder() / command_line.values.get("root", "runs")
    record = read_record(root, names[0])
    if record is None:
        known = sorted(path.name.removesuffix(".job.json") for path in root.glob("*.job.json"))
        found = f"no run of this name was submitted from {root}; submitted runs: {', '.join(known) or 'none'}"
        instead = f"python launch/submit.py {action} {known[0]}" if known else "--root DIR"
        raise RequestError(f"{action} {names[0]}", found, instead)
    if action == "log":
        reader = LogReader(root, record.name, record.array is not None, skip=False)
        print_text(reader.read())
        return _finish(record, root, reader, command_line)
    if action == "resume":
        reader = LogReader(root, record.name, record.array is not None)
        record = resubmit(root, record)
        _report(record, root)
        return _finish(record, root, reader, command_line)
    state = job_state(record)
    if action == "stop" and state.is_active is not False:
        stop(root, record)
        print_line(f"{record.name}: SIGTERM sent to job {record.id}; a run that has begun saves a checkpoint and stops")
    else:
        print_line(f"{record.name}: job {record.id} ({record.scheduler}): {state}")
    return Exit.FINISHED


def _finish(record: Record, root: Path, reader: LogReader, command_line: CommandLine) -> int:
    """Follows the job, if this was requested, and returns the exit code."""
    if "follow" in command_line.switches:
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


def check_fit_arguments(request: JobRequest, root: Path) -> None:
    """Raises an error for arguments that `fit` refuses, as far as this is known without importing torch.

    Raises:
        RequestError: An argument does not exist, has an invalid value, or is one that the script sets.
    """
    arguments = list(request.arguments)
    for token in arguments:
        name = token.partition("=")[0].removeprefix("--")
        if token.startswith("--") and name in BEFORE_DASHES:
            raise RequestError(f"-- {token}", "a flag of submit.py comes before --", f"{token}, before --")
        if token.startswith("--") and (name in SET_BY_SCRIPT or (name == "requeue" and request.scheduler == "pbs")):
            raise RequestError(f"-- {token}", "the script sets this flag of fit.py", f"leave {token} out")
    if arguments and arguments[0] in SUBCOMMANDS:
        raise RequestError(f"-- {arguments[0]}", "a job runs fit.py", f"leave {arguments[0]} out")
    flags = parse_arguments(FIT, [_first_member(request, token) for token in fit_arguments(request, root)])
    if flags.only_prints or flags.explain:
        raise RequestError(f"-- {' '.join(arguments)}", "these arguments train nothing", "leave them out")


def check_with_fit(request: JobRequest, command: Sequence[str]) -> None:
    """Lets `fit` itself check its arguments, with the Python of the job; this imports torch and takes some seconds.

    Only a refusal counts: on a login node, the import itself may fail, for example without the job's modules.

    Raises:
        RequestError: `fit` refuses the arguments.
    """
    arguments = [_first_member(request, token) for token in request.arguments]
    process = subprocess.run(
        [*command, *arguments, "--launcher=local", "--print_config"],
        env={**without_job_variables(), "PYTHONDONTWRITEBYTECODE": "1"},  # a refused job leaves no file
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    if process.returncode == Exit.WRONG_REQUEST:
        reason = process.stderr.strip().removeprefix("rankzero: cannot start").strip()
        raise RequestError(f"-- {shlex.join(arguments)}", f"fit.py refuses:\n{reason}", "the corrected arguments")


def program(request: JobRequest, folder: Path) -> list[str]:
    """Returns Python and the program that trains: `fit.py` beside this script, or the installed package.

    Raises:
        RequestError: The virtual environment has no Python.
    """
    if request.image is not None:
        return ["python", "-m", "rankzero", "fit"]
    python = Path(sys.executable)
    if request.venv is not None:
        python = folder / request.venv / "bin" / "python"
        if not python.is_file():
            raise RequestError(f"--venv {request.venv}", f"{python} does not exist", "--venv .venv")
    script = Path(sys.argv[0]).absolute().with_name("fit.py")
    runs_script = Path(sys.argv[0]).name == "submit.py" and script.is_file()
    return [str(python), *([str(script)] if runs_script else ["-m", "rankzero", "fit"])]


def _first_member(request: JobRequest, argument: str) -> str:
    """Returns an argument as the first member of a job array gets it."""
    return argument.replace(ARRAY_INDEX, "0") if request.array else argument


def _report(record: Record, root: Path) -> None:
    """Prints the job's id and the commands to watch, stop and resume it."""
    form = f", {record.form}" if record.form else ""
    log = log_path(root, record.name) if record.array is None else root / f"{record.name}.job-INDEX.log"
    rows = {
        "script": shlex.quote(str(script_path(root, record.name))),
        "log": shlex.quote(str(log)),
        "watch": _command("log", record, root) + " --follow",
        "state": _command("status", record, root),
        "stop": _command("stop", record, root),
        "resume": _command("resume", record, root),
    }
    lines = [f"rankzero: submitted run {record.name} as job {record.id} ({record.scheduler}{form})"]
    print_line("\n".join([*lines, *(f"  {label:<7} {text}" for label, text in rows.items())]))


def _command(action: str, record: Record, root: Path) -> str:
    """Returns the command line of an action, as this user would type it."""
    script = sys.argv[0] if Path(sys.argv[0]).name == "submit.py" else "launch/submit.py"
    options = "" if root == Path.cwd() / "runs" else f" --root {shlex.quote(str(root))}"
    return spelled(f"python {shlex.quote(script)} {action} {record.name}{options}")
