"""The scheduler's job that this process runs in, and when the scheduler ends it. Imports no torch."""

import calendar
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass

from rankzero.distributed.environments.launch import Launch, Variables
from rankzero.distributed.scheduler.durations import seconds_of
from rankzero.distributed.scheduler.query import ask

MOMENT_SECONDS = 2.0
"""How long until qstat is asked again: right after a rerun it can lack `stime` once (OpenPBS 23.06)."""


@dataclass(frozen=True)
class Job:
    """A scheduler's job, whatever has started processes within it.

    Args:
        scheduler: `slurm` or `pbs`.
        name: What the scheduler's programs call it, a member of an array by its own name.
        variables: The environment.
    """

    scheduler: str
    name: str
    variables: Variables


def job_around(launch: Launch, environ: Mapping[str, str] | None = None) -> Job | None:
    """The job that this process runs in; None where there is none.

    A job that was submitted from within a job of another scheduler has the variables of both: the launcher's own count.
    """
    variables = Variables(os.environ if environ is None else environ)
    jobs = {"slurm": _slurm_name(variables), "pbs": variables.find("PBS_JOBID")}
    for scheduler in sorted(jobs, key=lambda scheduler: scheduler != launch.launcher):
        if name := jobs[scheduler]:
            return Job(scheduler, name, variables)
    return None


def end_of_allocation(launch: Launch, environ: Mapping[str, str] | None = None) -> float | None:
    """When the scheduler ends the job around this process, in seconds since 1970; None where nobody says.

    Asks the scheduler's programs, which may take seconds: for rank zero alone.
    """
    job = job_around(launch, environ)
    if job is None:
        return None
    end = _slurm_end(job) if job.scheduler == "slurm" else _pbs_end(job)
    return end if end is not None and end > time.time() else None


def shown_by_qstat(job: Job) -> dict[str, str]:
    """What qstat says of a job of PBS's; empty where it says nothing.

    Its text, for its JSON is broken by variables that `qsub -V` hands on, such as functions (openpbs/openpbs#2541).
    """
    answer = ask("qstat", "-f", job.name)
    attributes: dict[str, str] = {}
    for name, value in re.findall(r"^ +([\w.]+) = (.*)$", answer.text if answer.ok else "", re.MULTILINE):
        attributes.setdefault(name, value.strip())
    return attributes


def _slurm_name(variables: Variables) -> str | None:
    """The job's id. The id of an array's last member is the whole array's too, so members go by array and index."""
    array, index = variables.find("SLURM_ARRAY_JOB_ID"), variables.find("SLURM_ARRAY_TASK_ID")
    return f"{array}_{index}" if array and index else variables.find("SLURM_JOB_ID")


def _slurm_end(job: Job) -> float | None:
    """From the variable of newer versions (22.05 has none), else from the time that squeue says is left."""
    end_time = job.variables.find("SLURM_JOB_END_TIME")
    if end_time and end_time.isascii() and end_time.isdigit():
        return float(end_time)
    answer = ask("squeue", "--noheader", f"--jobs={job.name}", "--format=%L")
    return time.time() + seconds_of(answer.text) if answer.ok and _is_time(answer.text) else None


def _pbs_end(job: Job) -> float | None:
    """The job's start and the time that it was given."""
    for pause in (0.0, MOMENT_SECONDS):
        time.sleep(pause)
        shown = shown_by_qstat(job)
        walltime = shown.get("Resource_List.walltime", "")
        if not _is_time(walltime):
            return None
        start = _seconds_since_1970(shown.get("stime", ""))
        if start is not None:
            return start + seconds_of(walltime)
    return None


def _is_time(text: str) -> bool:
    """Whether this is a time as schedulers print it, and not `UNLIMITED`, `INVALID` or nothing."""
    if ":" not in text:
        return False
    try:
        return seconds_of(text) > 0
    except ValueError:
        return False


def _seconds_since_1970(text: str) -> float | None:
    """Reads a time of qstat's: `Thu Nov 20 14:48:00 2026`, in UTC as it was asked for."""
    try:
        return calendar.timegm(time.strptime(text))
    except ValueError:
        return None
