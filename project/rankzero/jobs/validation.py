"""Checks the program, the script and the arguments of a job before it is submitted. Does not import torch."""

import os
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from rankzero.cli.arguments import parse_arguments
from rankzero.cli.command import SUBCOMMANDS, Command
from rankzero.distributed.scheduler.query import find_program, without_job_variables
from rankzero.jobs.options import FLAGS, SUBMIT_FLAGS, JobRequest
from rankzero.jobs.record import array_indices
from rankzero.jobs.script import ARRAY_INDEX, fit_arguments
from rankzero.messages import RequestError

BEFORE_DASHES = (*FLAGS, *(flag.name for flag in SUBMIT_FLAGS if flag.name not in FLAGS))
"""Flags of `submit`; some are flags of `fit` too."""

SET_BY_SCRIPT = ("node_rank", "master_addr", "master_port")
"""Flags of `fit` that the script sets."""


def check_fit_arguments(request: JobRequest, root: Path, fit: Command) -> None:
    """Raises an error for arguments that `fit` refuses, as far as this is known without importing torch.

    Raises:
        RequestError: An argument does not exist, has an invalid value, or is one that the script sets.
    """
    arguments = list(request.arguments)
    if request.array is None and any(ARRAY_INDEX in token for token in arguments):
        raise RequestError(f"-- {shlex.join(arguments)}", f"{ARRAY_INDEX} needs a job array", "--array 0-3, before --")
    for token in arguments:
        name = token.partition("=")[0].removeprefix("--")
        if token.startswith("--") and name in BEFORE_DASHES:
            raise RequestError(f"-- {token}", "a flag of submit.py comes before --", f"{token}, before --")
        if token.startswith("--") and (name in SET_BY_SCRIPT or (name == "requeue" and request.scheduler == "pbs")):
            raise RequestError(f"-- {token}", "the script sets this flag of fit.py", f"leave {token} out")
    if arguments and arguments[0] in SUBCOMMANDS:
        raise RequestError(f"-- {arguments[0]}", "a job runs fit.py", f"leave {arguments[0]} out")
    flags = parse_arguments(fit, [_first_member(request, token) for token in fit_arguments(request, root)])
    if flags.only_prints or flags.explain:
        raise RequestError(f"-- {' '.join(arguments)}", "these arguments train nothing", "leave them out")


def check_with_fit(request: JobRequest, command: Sequence[str]) -> None:
    """Lets `fit` itself check its arguments, with the Python of the job; this imports torch and takes some seconds.

    Raises:
        RequestError: `fit` refuses the arguments, or cannot be run.
    """
    arguments = [_first_member(request, token) for token in request.arguments]
    try:
        process = subprocess.run(
            [*command, *arguments, "--launcher=local", "--print_config"],
            env={**without_job_variables(), "PYTHONDONTWRITEBYTECODE": "1"},  # a refused job leaves no file
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise RequestError(f"--venv {request.venv}", f"{command[0]}: {error.strerror}", "--venv .venv") from None
    if process.returncode:
        refusal = textwrap.dedent(process.stderr.partition("rankzero: cannot start\n")[2]).strip()
        reason = refusal or (process.stderr.strip() or f"exit code {process.returncode}").splitlines()[-1]
        instead = "the corrected arguments, or leave --validate out"
        raise RequestError(f"-- {shlex.join(arguments)}", f"fit.py refuses:\n{reason}", instead)


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
        if not os.access(python, os.X_OK):
            found = f"{python} {'is not executable' if python.exists() else 'does not exist'}"
            raise RequestError(f"--venv {request.venv}", found, "--venv .venv")
    script = Path(sys.argv[0]).absolute().with_name("fit.py")
    runs_script = Path(sys.argv[0]).name == "submit.py" and script.is_file()
    return [str(python), *([str(script)] if runs_script else ["-m", "rankzero", "fit"])]


def _first_member(request: JobRequest, argument: str) -> str:
    """Returns an argument as the first member of a job array gets it."""
    return argument.replace(ARRAY_INDEX, str(array_indices(request.array)[0])) if request.array else argument


def check_syntax(text: str) -> None:
    """Raises an error if bash cannot parse a script.

    The template is correct, so the cause is a line of `--setup` or `--extra`.
    """
    bash = find_program("bash")
    if bash is None:
        return
    command = [bash, "-n", "/dev/stdin"]
    process = subprocess.run(command, input=os.fsencode(text), capture_output=True, env=without_job_variables())
    if process.returncode:
        reason = process.stderr.decode(errors="replace").replace("/dev/stdin: ", "").strip()
        raise RequestError("--setup and --extra", f"a syntax error: {reason}", "bash -c 'COMMAND', to try a command")
