"""The command `submit`: writes the script of a job, submits it, and watches, stops or resumes it."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rankzero.cli.arguments import parse_arguments
from rankzero.cli.command import SUBCOMMANDS
from rankzero.commands.fit import FIT
from rankzero.commands.jobs.command_line import CommandLine, job_request, parse
from rankzero.commands.jobs.follow import LogReader, follow
from rankzero.commands.jobs.options import help_text, is_queuing
from rankzero.commands.jobs.record import Record, read_record
from rankzero.commands.jobs.request import JobRequest
from rankzero.commands.jobs.schedulers import slurm
from rankzero.commands.jobs.script import ARRAY_INDEX, log_path, render, script_path
from rankzero.commands.jobs.submission import job_state, resubmit, stop, submit
from rankzero.commands.start import resolve_subcommand
from rankzero.distributed.stop_and_failure.error_reporter import refuse
from rankzero.messages import CannotStart, Exit, RequestError, flush_streams, print_line, spelled

ACTIONS = ("status", "log", "stop", "resume")
"""First argument -> what to do with the job of a run."""

OWN_FLAGS = ("name", "run", "run_name", "root", "nodes", "devices", "node_rank", "master_addr", "master_port")
"""Flags of `fit` that the script sets."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments, by default `sys.argv[1:]`, and returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if arguments and arguments[0] in ACTIONS:
            return _act(arguments[0], parse(arguments[1:]))
        return _submit(parse(arguments))
    except KeyboardInterrupt:
        return 130
    except CannotStart as error:
        return refuse(error, None)
    finally:
        flush_streams()


def _submit(command_line: CommandLine) -> int:
    """Submits a job, or prints its script."""
    if "help" in command_line.switches:
        print_line(help_text())
        return Exit.FINISHED
    if command_line.words:
        word = command_line.words[0]
        raise RequestError(
            word, f"unexpected argument; the actions are {', '.join(ACTIONS)}", f"-- {word}, for an argument of fit.py"
        )
    request = job_request(command_line)
    check_fit_arguments(request)
    folder = Path.cwd()
    text = render(request, program(request, folder), folder, request.scheduler == "slurm" and slurm.supports_expedite())
    if "dry_run" in command_line.switches:
        print(text, end="")
        return Exit.FINISHED
    root = folder / request.root
    reader = LogReader(root, request.name, request.array is not None)
    record = submit(request, text, folder)
    _report(record, root)
    if is_queuing(request.scheduler) and not request.gpus_per_device:
        print_line("  no GPU is requested; --gpus_per_device 1 requests one for each process")
    return follow(root, record, reader) if "follow" in command_line.switches else Exit.FINISHED


def _act(action: str, command_line: CommandLine) -> int:
    """Prints the state or the log of a job, stops it, or resumes it."""
    names = [*command_line.words, *filter(None, [command_line.values.get("name")])]
    if len(names) != 1 or not set(command_line.values) <= {"name", "root"}:
        raise RequestError(
            f"submit.py {action} {' '.join(names)}",
            "expected the name of one run",
            f"python launch/submit.py {action} my-run",
        )
    root = Path.cwd() / command_line.values.get("root", "runs")
    record = read_record(root, names[0])
    if record is None:
        known = sorted(path.name.removesuffix(".job.json") for path in root.glob("*.job.json"))
        found = f"no run of this name was submitted from {root}; submitted runs: {', '.join(known) or 'none'}"
        raise RequestError(
            f"{action} {names[0]}", found, f"python launch/submit.py {action} {known[0]}" if known else "--root DIR"
        )
    follows = "follow" in command_line.switches
    if action == "status":
        print_line(f"{record.name}: job {record.id} ({record.scheduler}): {job_state(record).text}")
    elif action == "log":
        reader = LogReader(root, record.name, record.array is not None, skip=False)
        print(reader.read(), end="", flush=True)
        return follow(root, record, reader) if follows else Exit.FINISHED
    elif action == "stop":
        state = job_state(record)
        if state.is_active is False:
            print_line(f"{record.name}: job {record.id}: {state.text}")
            return Exit.FINISHED
        stop(record)
        print_line(f"{record.name}: job {record.id} gets SIGTERM; a run that has begun saves a checkpoint and stops")
    else:
        reader = LogReader(root, record.name, record.array is not None)
        record = resubmit(root, record)
        _report(record, root)
        return follow(root, record, reader) if follows else Exit.FINISHED
    return Exit.FINISHED


def check_fit_arguments(request: JobRequest) -> None:
    """Raises an error for arguments that `fit` would refuse, so that a typo is found before the job waits.

    Raises:
        RequestError: An argument does not exist, has an invalid value, or is one that the script sets.
    """
    arguments = list(request.arguments)
    for token in arguments:
        name = token.partition("=")[0].removeprefix("--")
        if token.startswith("--") and name in OWN_FLAGS:
            known = name in ("nodes", "devices", "root", "name", "run", "run_name")
            raise RequestError(
                f"-- {token}",
                "the script sets this flag of fit.py",
                f"{token}, before --" if known else f"leave {token} out",
            )
    if arguments and arguments[0] in SUBCOMMANDS and resolve_subcommand(FIT, arguments)[0] != FIT.name:
        raise RequestError(f"-- {arguments[0]}", "a job runs fit.py", f"python launch/fit.py {arguments[0]} ...")
    checked = [token.replace(ARRAY_INDEX, "0") for token in arguments] if request.array else arguments
    flags = parse_arguments(FIT, resolve_subcommand(FIT, checked)[1])
    if flags.only_prints or flags.explain:
        raise RequestError(f"-- {' '.join(arguments)}", "these arguments train nothing", "leave them out")


def program(request: JobRequest, folder: Path) -> list[str]:
    """Returns Python and the program that trains: `fit.py` beside this script, or the installed package.

    Raises:
        RequestError: The virtual environment has no Python.
    """
    script = Path(sys.argv[0]).absolute().with_name("fit.py")
    is_installed = Path(sys.argv[0]).name != "submit.py" or not script.is_file()
    if request.image is not None:
        return ["python", "-m", "rankzero", "fit"]
    python = Path(sys.executable)
    if request.venv is not None:
        python = folder / request.venv / "bin" / "python"
        if not python.is_file():
            raise RequestError(f"--venv {request.venv}", f"{python} does not exist", "--venv .venv")
    return [str(python), *(["-m", "rankzero", "fit"] if is_installed else [str(script)])]


def _report(record: Record, root: Path) -> None:
    """Prints the job's id and the commands to watch, stop and resume it."""
    options = "" if root == Path.cwd() / "runs" else f" --root {shlex.quote(str(root))}"
    form = f", {record.form}" if record.form else ""
    log = log_path(root, record.name) if record.array is None else root / f"{record.name}.job-INDEX.log"
    rows = {"script": shlex.quote(str(script_path(root, record.name))), "log": shlex.quote(str(log))}
    for label, action, switch in (
        ("watch", "log", " --follow"),
        ("state", "status", ""),
        ("stop", "stop", ""),
        ("resume", "resume", ""),
    ):
        rows[label] = f"python launch/submit.py {action} {record.name}{options}{switch}"
    lines = [f"rankzero: submitted run {record.name} as job {record.id} ({record.scheduler}{form})"]
    print_line(spelled("\n".join([*lines, *(f"  {label:<7} {text}" for label, text in rows.items())])))
