"""Submits, stops and resumes jobs, and queries their state, for all schedulers. Does not import torch."""

import os
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from rankzero.commands.jobs.record import Record, read_record, stop_path, write_record
from rankzero.commands.jobs.request import JobRequest
from rankzero.commands.jobs.schedulers import background, pbs, slurm
from rankzero.commands.jobs.schedulers.state import State
from rankzero.commands.jobs.script import log_path, script_path
from rankzero.distributed.process.clean_environment import without_job_variables
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


def check_submission(request: JobRequest, root: Path) -> None:
    """Raises an error if the job cannot be submitted now.

    Raises:
        RequestError: A program is missing, or the run has a job that waits or runs.
    """
    queue = _QUEUES.get(request.scheduler)
    own_program = "ssh" if request.hosts and request.form is None else _PROGRAMS.get(request.form or request.scheduler)
    _require(request.scheduler, queue.SUBMIT if queue else own_program or "bash")
    record = read_record(root, request.name)
    if record is not None:
        _refuse_active(record)


def submit(request: JobRequest, text: str, folder: Path) -> Record:
    """Writes the script of a job and submits it. If the job is rejected, all files are as before.

    Args:
        request: The job.
        text: The script.
        folder: Folder in which the job runs.

    Raises:
        RequestError: The scheduler rejects the job, the script cannot be written, or as in `check_submission`.
    """
    root = folder / request.root
    check_submission(request, root)
    missing_folders = [parent for parent in (root, *root.parents) if not parent.exists()]
    script = script_path(root, request.name)
    try:
        root.mkdir(parents=True, exist_ok=True)
        earlier = script.read_bytes() if script.exists() else None
        script.write_bytes(os.fsencode(text))
    except OSError as error:
        raise RequestError(f"--root {root}", f"cannot write to it: {error.strerror}", "--root DIR") from None
    record = Record(request.name, request.scheduler, request.form, "", request.array)
    try:
        job, started = _start(script, root, record)
    except BaseException:
        with suppress(OSError):
            script.unlink() if earlier is None else script.write_bytes(earlier)
            for parent in missing_folders:
                parent.rmdir()
        raise
    return _write(root, record, job, started)


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
    return _write(root, record, *_start(script, root, record))


def job_state(record: Record) -> State:
    """Returns the state of a job."""
    queue = _QUEUES.get(record.scheduler)
    state: State = queue.state(record) if queue else background.state(record)
    return state


def stop(root: Path, record: Record) -> None:
    """Ends a job with SIGTERM, after which the run saves and stops.

    Raises:
        RequestError: The scheduler's program is missing or fails, or the job cannot be reached from this machine.
    """
    queue = _QUEUES.get(record.scheduler)
    if queue is None:
        background.stop(record)
        return
    if record.scheduler == "pbs":
        with suppress(OSError):
            stop_path(root, record.name).touch()
    command = queue.stop_command(record)
    process = _run(record.scheduler, command, None)
    if process.returncode:
        stop_path(root, record.name).unlink(missing_ok=True)
        reason = process.stderr.strip() or process.stdout.strip() or f"exit code {process.returncode}"
        raise RequestError(f"to stop job {record.id}", reason, " ".join(command))


def _start(script: Path, root: Path, record: Record) -> tuple[str, str]:
    """Submits or starts a script; returns the id of the job, and the start time of its process without a queue."""
    if queue := _QUEUES.get(record.scheduler):
        return _enqueue(queue, script, root, record), ""
    try:
        return background.start(script, log_path(root, record.name))
    except OSError as error:
        raise RequestError(f"to start {script}", str(error), "--root DIR, or install bash") from None


def _write(root: Path, record: Record, job: str, started: str) -> Record:
    """Writes the record of a submitted job, and returns it."""
    submitted = replace(record, id=job, host=socket.gethostname(), started=started)
    try:
        write_record(root, submitted)
    except OSError as error:
        found = f"its record cannot be written: {error.strerror}"
        raise RequestError(f"run {record.name}, submitted as job {job}", found, f"free space in {root}") from None
    return submitted


def _enqueue(queue: ModuleType, script: Path, root: Path, record: Record) -> str:
    """Submits a script to a queue; returns the id of the job."""
    log, archived = log_path(root, record.name), None
    earlier = read_record(root, record.name)
    if record.scheduler == "pbs" and earlier is not None and log.exists():  # PBS would overwrite it
        archived = log.rename(log.with_name(f"{log.name}.{earlier.id}"))
    process = _run(record.scheduler, queue.submit_command(script), root)
    job: str | None = queue.job_id(process.stdout.strip())
    if process.returncode or job is None:
        if archived is not None:
            archived.rename(log)
        reason = process.stderr.strip() or process.stdout.strip() or f"exit code {process.returncode}"
        raise RequestError(
            f"to submit run {record.name} with {queue.SUBMIT}",
            reason,
            "the same command with another value, or with --dry_run to see the script",
        )
    return job


def _require(scheduler: str, program: str) -> None:
    """Raises an error if a program of the scheduler is not installed."""
    if find_program(program) is None:
        raise RequestError(
            f"--scheduler {scheduler}",
            f"{program} is not on the PATH of {socket.gethostname()}",
            "the same command on a machine that has it, or --dry_run to print the script",
        )


def _refuse_active(record: Record) -> None:
    """Raises an error if the job waits or runs."""
    state = job_state(record)
    if state.is_active:
        raise RequestError(
            f"to submit run {record.name}",
            f"its job {record.id} ({record.scheduler}) is {state}",
            f"python launch/submit.py stop {record.name}, and submit it when the job has ended; or another --name",
        )


def _run(scheduler: str, command: Sequence[str], folder: Path | None) -> "subprocess.CompletedProcess[str]":
    """Runs a program of a scheduler, without the variables of a job in which this process may run."""
    _require(scheduler, command[0])
    return subprocess.run(
        [find_program(command[0]) or command[0], *command[1:]],
        cwd=folder,
        env=without_job_variables(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
