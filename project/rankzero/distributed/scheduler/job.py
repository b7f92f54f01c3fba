"""Finds the scheduler job of this process, and when the scheduler terminates it."""

import calendar
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import psutil

from rankzero.distributed.environments.launch import Launch, Variables
from rankzero.distributed.scheduler.durations import parse_duration
from rankzero.distributed.scheduler.query import run_program
from rankzero.distributed.timers import TIMERS
from rankzero.messages import print_error

Warn = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """A scheduler job, whichever launcher started the processes in it.

    Args:
        scheduler: `slurm`, `pbs`, `lsf` or `flux`.
        id: The id by which the scheduler's programs know the job; for a member of a job array, the member's own id.
        variables: The environment variables.
    """

    scheduler: str
    id: str
    variables: Variables


def current_job(launch: Launch, environ: Mapping[str, str] | None = None) -> Job | None:
    """Returns the job in which this process runs; None outside a job.

    A job that was submitted from within another scheduler's job has the variables of both schedulers. Then the
    scheduler that is also the launcher takes precedence. Flux in a job of another scheduler ends with that job.
    """
    variables = Variables(os.environ if environ is None else environ)
    jobs = {"slurm": _slurm_id(variables), "pbs": variables.find("PBS_JOBID"), "lsf": _lsf_id(variables)}
    jobs["flux"] = variables.find("FLUX_JOB_ID") or variables.find("FLUX_ENCLOSING_ID")  # of a task or of a script
    for scheduler in sorted(jobs, key=lambda scheduler: scheduler == "flux" or scheduler != launch.launcher):
        if job_id := jobs[scheduler]:
            return Job(scheduler, job_id, variables)
    return None


def end_of_allocation(
    launch: Launch, environ: Mapping[str, str] | None = None, warn: Warn | None = None
) -> float | None:
    """Returns when the scheduler terminates this process's job, in seconds since 1970; None if unknown.

    Runs the scheduler's programs, which may take seconds; only rank zero should call. `warn` prints a message if the
    scheduler does not answer; None prints none.
    """
    if (job := current_job(launch, environ)) is None:
        return None
    end = {"slurm": _slurm_end, "pbs": _pbs_end, "lsf": _lsf_end, "flux": _flux_end}[job.scheduler](job, warn)
    return end if end is not None and end > time.time() else None


def attempt_deadline(time_limit: str | None, launch: Launch) -> float:
    """Returns when this attempt must end: at `time_limit` or at the end of the scheduler's job, whichever is earlier.

    Args:
        time_limit: Duration since the start of this process, such as `2h`; None for no limit.
        launch: The rank and the launcher of this process.

    Returns:
        A time of `time.monotonic`, in seconds; infinity without a limit and on all ranks but zero, which decides.
    """
    if launch.rank != 0:
        return math.inf
    ends = [end_of_allocation(launch, warn=None if time_limit else print_error) or math.inf]
    if time_limit:
        ends.append(psutil.Process().create_time() + parse_duration(time_limit))
    return min(ends) - time.time() + time.monotonic()


def qstat_attributes(job: Job, warn: Warn | None = None) -> dict[str, str]:
    """Returns the attributes that qstat prints for a PBS job; empty, after a warning, if it prints none.

    Parses qstat's text output. Its JSON output is invalid if `qsub -V` passes on certain variables, such as shell
    functions (openpbs/openpbs#2541).
    """
    attributes: dict[str, str] = {}
    for name, value in re.findall(r"^ +([\w.]+) = (.*)$", _ask(job, warn, "qstat", "-f", job.id), re.MULTILINE):
        attributes.setdefault(name, value.strip())
    return attributes


def _slurm_id(variables: Variables) -> str | None:
    """Returns the job's id; for a member of a job array, the array's id and the member's index.

    The last member of an array has the same `SLURM_JOB_ID` as the whole array, so that id would be ambiguous.
    """
    array, index = variables.find("SLURM_ARRAY_JOB_ID"), variables.find("SLURM_ARRAY_TASK_ID")
    return f"{array}_{index}" if array and index else variables.find("SLURM_JOB_ID")


def _slurm_end(job: Job, warn: Warn | None) -> float | None:
    """Returns the end from the variable of newer versions (22.05 lacks it), else from squeue's remaining time."""
    end_time = job.variables.find("SLURM_JOB_END_TIME")
    if end_time and end_time.isascii() and end_time.isdigit():
        return float(end_time)
    remaining = _ask(job, warn, "squeue", "--noheader", f"--jobs={job.id}", "--format=%L")
    return time.time() + parse_duration(remaining) if _is_duration(remaining) else None


def _pbs_end(job: Job, warn: Warn | None) -> float | None:
    """Returns the end of the job: its start plus its walltime; None if either is unknown."""
    for pause in (0.0, TIMERS.scheduler_pause):
        time.sleep(pause)
        attributes = qstat_attributes(job, warn)
        walltime = attributes.get("Resource_List.walltime", "")
        if not _is_duration(walltime):
            return None
        if (start := _seconds_since_1970(attributes.get("stime", ""))) is not None:
            return start + parse_duration(walltime)
    return None


def _lsf_id(variables: Variables) -> str | None:
    """Returns the job's id; for a member of a job array, with the member's index."""
    job, index = variables.find("LSB_JOBID"), variables.find("LSB_JOBINDEX") or "0"  # 0: of no job array
    return f"{job}[{index}]" if job and index != "0" else job


def _lsf_end(job: Job, warn: Warn | None) -> float | None:
    """Returns the end from the remaining time, such as `1:59 L`; another letter marks an estimate, not a limit."""
    text = _ask(job, warn, "bjobs", "-noheader", "-o", "time_left", job.id)
    if match := re.fullmatch(r"([0-9]+):([0-9]{2})(?::([0-9]{2}))? *L", text):
        hours, minutes, seconds = match.groups(default=-60)  # without seconds, the minute may be rounded up
        return time.time() + 3600 * int(hours) + 60 * int(minutes) + int(seconds)
    _warn_of(text, job, warn, "bjobs", no_limit="-")
    return None


def _flux_end(job: Job, warn: Warn | None) -> float | None:
    """Returns the end from the remaining seconds."""
    text = _ask(job, warn, "flux", "job", "timeleft")
    if re.fullmatch("[0-9]{1,9}", text):
        return time.time() + int(text)
    _warn_of(text, job, warn, "flux job timeleft", no_limit=str(2**32 - 1))
    return None


def _warn_of(answer: str, job: Job, warn: Warn | None, program: str, no_limit: str) -> None:
    """Warns of an answer that is neither a time nor the scheduler's word for a job without a limit."""
    if warn and answer not in ("", no_limit):
        warn(f"the time limit of job {job.id} is unknown ({program}: {answer!r}); set --time_limit to stop before it")


def _ask(job: Job, warn: Warn | None, *command: str) -> str:
    """Returns the output of a program; empty, after a warning that the job's end is unknown, if it does not answer."""
    answer = run_program(*command)
    if not answer.ok and warn:
        reason = (answer.text.splitlines() or ["no reason"])[-1]
        warn(f"the time limit of job {job.id} is unknown ({command[0]}: {reason}); set --time_limit to stop before it")
    return answer.text if answer.ok else ""


def _is_duration(text: str) -> bool:
    """Whether a text is a duration as schedulers print it, and not `UNLIMITED`, `INVALID` or nothing."""
    if ":" not in text:
        return False
    try:
        return parse_duration(text) > 0
    except ValueError:
        return False


def _seconds_since_1970(text: str) -> float | None:
    """Parses a time that qstat printed in UTC, such as `Thu Nov 20 14:48:00 2026`; None if invalid."""
    try:
        return calendar.timegm(time.strptime(text))
    except ValueError:
        return None
