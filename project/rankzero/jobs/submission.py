"""Submits, stops and resumes jobs, and queries their state, for all schedulers. Does not import torch."""

import os
import re
import shlex
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

from rankzero.distributed.scheduler.query import find_program, without_job_variables
from rankzero.jobs.options import JobRequest
from rankzero.jobs.record import Record, archive_logs, read_record, record_path, stop_path, write_record
from rankzero.jobs.schedulers import QUEUES, background, job_state
from rankzero.jobs.script import log_path, script_path
from rankzero.messages import RequestError

_PROGRAMS = {"openmpi": "mpirun", "mpich": "mpiexec.hydra", "ssh": "ssh", "docker": "docker", "apptainer": "apptainer"}
"""Form, or scheduler without forms -> the program that its script runs on this machine."""


def submit(request: JobRequest, text: str, folder: Path) -> Record:
    """Writes the script of a job and submits it. If the job is rejected, all files are as before.

    Raises:
        RequestError: A program is missing, the run has a job that waits or runs, the scheduler rejects the job, or the
            script cannot be written.
    """
    root = folder / request.root
    queue = QUEUES.get(request.scheduler)
    own_program = "ssh" if request.hosts and request.form is None else _PROGRAMS.get(request.form or request.scheduler)
    instead = "the same command on a machine that has it, or --dry_run to print the script"
    _require(queue.SUBMIT if queue else own_program or "bash", f"--scheduler {request.scheduler}", instead)
    earlier_job = read_record(root, request.name)
    if earlier_job is not None:
        _refuse_active(root, earlier_job, f"to submit run {request.name}", "or another --name")
    missing_folders = [parent for parent in (root, *root.parents) if not parent.exists()]
    script = script_path(root, request.name, request.scheduler)
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
    _refuse_active(root, record, f"to resume run {record.name}", "or wait until the job has ended")
    script = script_path(root, record.name, record.scheduler)
    if not script.is_file():
        instead = "submit the run again with its options"
        raise RequestError(f"to resume run {record.name}", f"{script} is missing", instead)
    return _write(root, record, *_start(script, root, record))


def stop(root: Path, record: Record) -> None:
    """Ends a job with SIGTERM, after which the run saves and stops.

    Raises:
        RequestError: The scheduler's program is missing or fails, or the job cannot be reached from this machine.
    """
    queue = QUEUES.get(record.scheduler)
    if queue is None:
        background.stop(record)
        return
    if record.scheduler == "pbs":
        with suppress(OSError):
            stop_path(root, record.name).touch()
    command = (*queue.STOP.split(), record.id)  # sends SIGTERM
    try:
        process = _run(command, None, f"to stop job {record.id}")
        if process.returncode:
            raise RequestError(f"to stop job {record.id}", _reason(process), " ".join(command))
    except BaseException:
        stop_path(root, record.name).unlink(missing_ok=True)
        raise


def _start(script: Path, root: Path, record: Record) -> tuple[str, str]:
    """Submits or starts a script; returns the id of the job, and the start time of its process without a queue."""
    queue = QUEUES.get(record.scheduler)
    try:
        script.touch()  # the time of the submission, for `_write`
        if queue is None:
            return background.start(script, log_path(root, record.name))
    except OSError as error:
        raise RequestError(f"to start {script}", str(error), "--root DIR, or install bash") from None
    asked = f"to submit run {record.name} with {queue.SUBMIT}"
    earlier = read_record(root, record.name)
    archived: dict[Path, Path] = {}
    try:
        if record.scheduler == "pbs" and earlier is not None:
            archive_logs(root, earlier, archived)
        with script.open() as text:  # bsub reads its standard input
            process = _run(queue.submit_command(script), root, asked, text)
        job = re.search(queue.JOB_ID, process.stdout.strip())
        if process.returncode or job is None:
            instead = f"the same command with another value; the script is {script}"
            raise RequestError(asked, _reason(process), instead)
    except BaseException:
        for log, archive in archived.items():
            archive.rename(log)
        raise
    return job[0], ""


def _write(root: Path, record: Record, job: str, started: str) -> Record:
    """Writes the record of a submitted job, and returns it."""
    submitted = replace(record, id=job, host=socket.gethostname(), started=started)
    try:
        write_record(root, submitted)
        begun = script_path(root, record.name, record.scheduler).stat().st_mtime_ns
        os.utime(record_path(root, record.name), ns=(begun, begun))  # a short job may have ended by now
    except OSError as error:
        found = f"its record cannot be written: {error.strerror}"
        raise RequestError(f"run {record.name}, submitted as job {job}", found, f"free space in {root}") from None
    return submitted


def _reason(process: "subprocess.CompletedProcess[str]") -> str:
    """Returns the error output of a failed program, or its exit code if it printed nothing."""
    return process.stderr.strip() or process.stdout.strip() or f"exit code {process.returncode}"


def _require(program: str, asked: str, instead: str) -> None:
    """Raises an error if a program of the scheduler is not installed."""
    if find_program(program) is None:
        raise RequestError(asked, f"{program} is not on the PATH of {socket.gethostname()}", instead)


def _refuse_active(root: Path, record: Record, asked: str, alternative: str) -> None:
    """Raises an error if the job waits or runs, or if its state is unknown."""
    state = job_state(record)
    found = f"its job {record.id} ({record.scheduler}) is {state}"
    if state.is_active is None:
        path = shlex.quote(str(record_path(root, record.name)))
        instead = f"the same command later; if you know that the job has ended: rm {path}"
        raise RequestError(asked, found, instead)
    if state.is_active:
        raise RequestError(asked, found, f"python launch/submit.py stop {record.name}, {alternative}")


def _run(
    command: Sequence[str], folder: Path | None, asked: str, text: IO[str] | int = subprocess.DEVNULL
) -> "subprocess.CompletedProcess[str]":
    """Runs a program of a scheduler, without the variables of a job in which this process may run."""
    _require(command[0], asked, "the same command on a machine that has it")
    return subprocess.run(
        [find_program(command[0]) or command[0], *command[1:]],
        cwd=folder,
        env=without_job_variables(),
        stdin=text,
        capture_output=True,
        text=True,
        errors="replace",
    )
