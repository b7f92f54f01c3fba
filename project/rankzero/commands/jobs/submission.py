"""Submits jobs, and asks for their state, whatever starts them. Does not import torch."""

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from rankzero.commands.jobs.record import Record, read_record, write_record
from rankzero.commands.jobs.request import JobRequest
from rankzero.commands.jobs.schedulers import background, pbs, slurm
from rankzero.commands.jobs.schedulers.state import State
from rankzero.commands.jobs.script import log_path, script_path
from rankzero.distributed.scheduler.query import find_program
from rankzero.messages import RequestError

_QUEUES: dict[str, ModuleType] = {"slurm": slurm, "pbs": pbs}

_PROGRAMS = {
    "openmpi": "mpirun",
    "mpich": "mpiexec.hydra",
    "ssh": "ssh",
    "docker": "docker",
    "apptainer": "apptainer",
}
"""Form, or scheduler without forms -> the program that its script runs on this machine."""


def submit(request: JobRequest, text: str, folder: Path) -> Record:
    """Writes the script of a job and submits it. If the job is rejected, all files are as before.

    Args:
        request: The job.
        text: The script.
        folder: Folder in which the job runs.

    Raises:
        RequestError: The scheduler's program is missing, the scheduler rejects the job, the run has a job that waits or
            runs, or the script cannot be written.
    """
    root = folder / request.root
    _check_program(request)
    record = read_record(root, request.name)
    if record is not None:
        _refuse_active(record)
    with _restored_on_error(root, script_path(root, request.name)) as script:
        script.write_text(text)
        return _start(script, root, Record(request.name, request.scheduler, request.form, "", request.array))


def resubmit(root: Path, record: Record) -> Record:
    """Submits the script of an ended job again.

    Raises:
        RequestError: The job waits or runs, its script is missing, or the scheduler rejects it.
    """
    _refuse_active(record)
    script = script_path(root, record.name)
    if not script.is_file():
        raise RequestError(
            f"to resume run {record.name}", f"{script} is missing", "submit the run again with its options"
        )
    return _start(script, root, record)


def job_state(record: Record) -> State:
    """Returns the state of a job."""
    queue = _QUEUES.get(record.scheduler)
    state: State = queue.state(record) if queue else background.state(record)
    return state


def stop(record: Record) -> None:
    """Ends a job with SIGTERM, after which the run saves and stops.

    Raises:
        RequestError: The scheduler's program fails.
    """
    queue = _QUEUES.get(record.scheduler)
    if queue is None:
        background.stop(record)
        return
    command = queue.stop_command(record)
    process = _run([find_program(command[0]) or command[0], *command[1:]], None)
    if process.returncode:
        raise RequestError(
            f"to stop job {record.id}", process.stderr.strip() or process.stdout.strip(), " ".join(command)
        )


def _start(script: Path, root: Path, record: Record) -> Record:
    """Submits or starts a script, and writes the record."""
    queue = _QUEUES.get(record.scheduler)
    if queue is None:
        pid, started = background.start(script, log_path(root, record.name))
        job = pid
    else:
        started = ""
        command = queue.submit_command(script)
        _archive_log(root, record)
        process = _run([find_program(command[0]) or command[0], *command[1:]], root)
        found = queue.job_id(process.stdout.strip())
        if process.returncode or found is None:
            words = process.stderr.strip() or process.stdout.strip() or f"exit code {process.returncode}"
            raise RequestError(
                f"to submit run {record.name} with {command[0]}",
                words,
                "the options of submit with another value; --dry_run prints the script",
            )
        job = found
    submitted = Record(record.name, record.scheduler, record.form, job, record.array, socket.gethostname(), started)
    write_record(root, submitted)
    return submitted


def _archive_log(root: Path, record: Record) -> None:
    """Renames the log of an earlier job under PBS, which overwrites it."""
    log, earlier = log_path(root, record.name), read_record(root, record.name)
    if record.scheduler == "pbs" and earlier is not None and log.exists():
        log.rename(log.with_name(f"{log.name}.{earlier.id}"))


def _check_program(request: JobRequest) -> None:
    """Raises an error if the program that starts the job is not installed."""
    queue = _QUEUES.get(request.scheduler)
    program = queue.SUBMIT if queue else _PROGRAMS.get(request.form or request.scheduler)
    if program and find_program(program) is None:
        raise RequestError(
            f"--scheduler {request.scheduler}",
            f"{program} is not on the PATH of {socket.gethostname()}",
            "the same command on a machine that has it, or --dry_run to print the script",
        )


def _refuse_active(record: Record) -> None:
    state = job_state(record)
    if state.is_active:
        raise RequestError(
            f"to submit run {record.name}",
            f"its job {record.id} is {state.text}",
            f"python launch/submit.py log {record.name} --follow",
        )


@contextmanager
def _restored_on_error(root: Path, script: Path) -> Iterator[Path]:
    """Creates the folder of the runs; if the block fails, removes what was created and restores the earlier script."""
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    try:
        root.mkdir(parents=True, exist_ok=True)
        earlier = script.read_bytes() if script.exists() else None
    except OSError as error:
        raise RequestError(f"--root {root}", f"cannot write to it: {error.strerror}", "--root DIR") from None
    try:
        yield script
    except BaseException as error:
        if earlier is None:
            script.unlink(missing_ok=True)
        else:
            script.write_bytes(earlier)
        for folder in missing:
            folder.rmdir()
        if isinstance(error, OSError):
            raise RequestError(f"--root {root}", f"cannot write to it: {error.strerror}", "--root DIR") from None
        raise


def _run(command: list[str], folder: Path | None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    )
