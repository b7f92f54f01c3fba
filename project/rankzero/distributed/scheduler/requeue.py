"""Has the scheduler run this job again, once everything is saved. Imports no torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.scheduler.job import Job, job_around, shown_by_qstat
from rankzero.distributed.scheduler.query import ask
from rankzero.messages import RequestError


class Requeue(Enum):
    """What came of it."""

    DONE = "requeued"
    """The scheduler ends this attempt now, SIGTERM and all, and starts the next."""

    NO_JOB = "no job"
    """Nothing to do: no scheduler's job, or an interactive one, in which a person types the next command."""

    ENDING = "ending"
    """Nothing to do: the job is ending already; a person cancelled it, or the scheduler requeues it itself."""

    REFUSED = "refused"
    """The message says what a person can do."""


@dataclass(frozen=True)
class Outcome:
    """What came of asking for another attempt.

    Args:
        requeue: Which of the cases it is.
        message: For a person; empty where there is nothing to do and nothing to tell.
    """

    requeue: Requeue
    message: str = ""


def requeue(launch: Launch, run: str = "NAME", environ: Mapping[str, str] | None = None) -> Outcome:
    """Asks the scheduler to run this job again. For rank zero alone, as the last thing; it never raises.

    Args:
        launch: How this process was started.
        run: The run's name, for the line that a person types where the scheduler refuses.
        environ: The variables; this process's own by default.
    """
    job = job_around(launch, environ)
    if job is None:
        return Outcome(Requeue.NO_JOB)
    return _requeue_slurm(job, run) if job.scheduler == "slurm" else _requeue_pbs(job, run)


def _requeue_slurm(job: Job, run: str) -> Outcome:
    """Requeues a batch job, unless it is ending."""
    shown = ask("scontrol", "show", "job", job.name, "--oneliner")
    if not shown.ok:
        return _refused(job, "scontrol show job", shown.text, "sbatch JOB_SCRIPT", run)
    if _field(shown.text, "BatchFlag") == "0":
        return Outcome(Requeue.NO_JOB)
    state, reason = _field(shown.text, "JobState"), _field(shown.text, "Reason")
    attempts = job.variables.find("SLURM_RESTART_COUNT") or "0"
    if _field(shown.text, "Restarts") != attempts:
        return Outcome(Requeue.ENDING, f"Slurm has requeued job {job.name} already")
    # A job that somebody cancelled is COMPLETING, and `scontrol requeue` would bring it back to life (Slurm 22.05). One
    # that has reached its limit is so too, but nobody wanted it gone.
    if state != "RUNNING" and reason != "TimeLimit":
        return Outcome(Requeue.ENDING, f"job {job.name} is {state}, as if cancelled: it is not requeued")
    answer = ask("scontrol", "requeue", job.name)
    if answer.ok:
        return Outcome(Requeue.DONE, f"job {job.name} is requeued")
    script = re.search(r" Command=(/.*?) WorkDir=", shown.text)
    return _refused(job, "scontrol requeue", answer.text, f"sbatch {script[1] if script else 'JOB_SCRIPT'}", run)


def _requeue_pbs(job: Job, run: str) -> Outcome:
    """Reruns a job, which most servers allow to operators alone."""
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
    """A field of what `scontrol show job` says; empty where it is not there."""
    match = re.search(rf" {name}=(\S*)", shown)
    return match[1] if match else ""


def _refused(job: Job, command: str, said: str, submit: str, run: str) -> Outcome:
    """The message for a person: what they type instead."""
    message = RequestError(
        f"job {job.name} to be requeued, as the run has stopped before its end",
        f"{command} {job.name}: {said}",
        f"{submit}\nThe run resumes from its last checkpoint if the job's command has --name {run}.",
    )
    return Outcome(Requeue.REFUSED, str(message))
