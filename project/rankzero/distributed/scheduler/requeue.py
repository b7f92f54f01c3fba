"""Requeues the scheduler job after everything is saved. Does not import torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.scheduler.job import Job, job_around, shown_by_qstat
from rankzero.distributed.scheduler.query import ask
from rankzero.messages import RequestError


class Requeue(Enum):
    """The result of a requeue request."""

    DONE = "requeued"
    """The scheduler terminates this attempt now, beginning with SIGTERM, and starts the next one."""

    NO_JOB = "no job"
    """Nothing to do: there is no job, or the job is interactive and the user types the next command."""

    ENDING = "ending"
    """Nothing to do: the job is already ending, because it was canceled or because the scheduler requeues it."""

    REFUSED = "refused"
    """The scheduler refused the request; the message states what the user can type."""


@dataclass(frozen=True)
class Outcome:
    """The result of a requeue request, with a message for the user.

    Args:
        requeue: The kind of result.
        message: Text for the user; empty if there is nothing to do or report.
    """

    requeue: Requeue
    message: str = ""


def requeue(launch: Launch, run: str = "NAME", environ: Mapping[str, str] | None = None) -> Outcome:
    """Requests that the scheduler run this job again; never raises. Only rank zero may call, as its last action.

    Args:
        launch: How this process was launched.
        run: The run's name, for the command that the user types if the scheduler refuses.
        environ: The environment variables; by default, this process's own.
    """
    job = job_around(launch, environ)
    if job is None:
        return Outcome(Requeue.NO_JOB)
    return _requeue_slurm(job, run) if job.scheduler == "slurm" else _requeue_pbs(job, run)


def _requeue_slurm(job: Job, run: str) -> Outcome:
    """Requeues a Slurm batch job, unless it is ending."""
    shown = ask("scontrol", "show", "job", job.name, "--oneliner")
    if not shown.ok:
        return _refused(job, "scontrol show job", shown.text, "sbatch JOB_SCRIPT", run)
    if _field(shown.text, "BatchFlag") == "0":
        return Outcome(Requeue.NO_JOB)
    state, reason = _field(shown.text, "JobState"), _field(shown.text, "Reason")
    attempts = job.variables.find("SLURM_RESTART_COUNT") or "0"
    if _field(shown.text, "Restarts") != attempts:
        return Outcome(Requeue.ENDING, f"Slurm has requeued job {job.name} already")
    # A canceled job is COMPLETING, and `scontrol requeue` would start it again against the user's will (Slurm 22.05).
    # A job at its time limit is COMPLETING too, but it was not canceled.
    if state != "RUNNING" and reason != "TimeLimit":
        return Outcome(Requeue.ENDING, f"job {job.name} is {state}, as if cancelled: it is not requeued")
    answer = ask("scontrol", "requeue", job.name)
    if answer.ok:
        return Outcome(Requeue.DONE, f"job {job.name} is requeued")
    script = re.search(r" Command=(/.*?) WorkDir=", shown.text)
    return _refused(job, "scontrol requeue", answer.text, f"sbatch {script[1] if script else 'JOB_SCRIPT'}", run)


def _requeue_pbs(job: Job, run: str) -> Outcome:
    """Reruns a PBS job; most servers permit this only to operators."""
    if job.variables.find("PBS_ENVIRONMENT") == "PBS_INTERACTIVE":
        return Outcome(Requeue.NO_JOB)
    state = shown_by_qstat(job).get("job_state", "R")
    if state != "R":
        return Outcome(Requeue.ENDING, f"job {job.name} is in state {state}: it is ending, and is not requeued")
    answer = ask("qrerun", job.name)
    if answer.ok:
        return Outcome(Requeue.DONE, f"job {job.name} is requeued")
    return _refused(job, "qrerun", answer.text, "qsub JOB_SCRIPT", run)


def _field(shown: str, name: str) -> str:
    """Returns a field of the output of `scontrol show job`; empty if the field is missing."""
    match = re.search(rf" {name}=(\S*)", shown)
    return match[1] if match else ""


def _refused(job: Job, command: str, said: str, submit: str, run: str) -> Outcome:
    """Returns the outcome of a refused request, with the command that the user can type instead."""
    message = RequestError(
        f"job {job.name} to be requeued, as the run has stopped before its end",
        f"{command} {job.name}: {said}",
        f"{submit}\nThe run resumes from its last checkpoint if the job's command has --name {run}.",
    )
    return Outcome(Requeue.REFUSED, str(message))
