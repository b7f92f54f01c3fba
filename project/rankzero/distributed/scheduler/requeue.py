"""Requeues the scheduler job after everything is saved."""

import re
from collections.abc import Mapping

from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.scheduler.job import Job, current_job, qstat_attributes
from rankzero.distributed.scheduler.query import run_program
from rankzero.messages import RequestError

REQUEUING = ("slurm", "pbs")
"""Schedulers that are asked to run a job again. LSF does so by its exit code, and the script of a Flux job itself."""


def requeue(launch: Launch, run: str = "NAME", environ: Mapping[str, str] | None = None) -> str:
    """Requests that the scheduler run this job again; never raises. Only rank zero may call, once all is saved.

    After a successful request, the scheduler terminates this attempt, beginning with SIGTERM, and starts the next one.

    Returns:
        A message for the user; empty outside a job, and in an interactive job, where the user types the next command.
    """
    if (job := current_job(launch, environ)) is None or job.scheduler not in REQUEUING:
        return ""
    return _requeue_slurm(job, run) if job.scheduler == "slurm" else _requeue_pbs(job, run)


def _requeue_slurm(job: Job, run: str) -> str:
    """Requeues a Slurm batch job, unless it is ending."""
    job_record = run_program("scontrol", "show", "job", job.id, "--oneliner")
    if not job_record.ok:
        return _refused(job, "scontrol show job", job_record.text, "sbatch JOB_SCRIPT", run)
    if _field(job_record.text, "BatchFlag") == "0":
        return ""
    state, reason = _field(job_record.text, "JobState"), _field(job_record.text, "Reason")
    attempts = job.variables.find("SLURM_RESTART_COUNT") or "0"
    if _field(job_record.text, "Restarts") != attempts:
        return f"Slurm has already requeued job {job.id}"
    # A canceled job is COMPLETING, and `scontrol requeue` would start it again against the user's will (Slurm 22.05).
    # A job at its time limit is COMPLETING too, but it was not canceled.
    if state != "RUNNING" and reason != "TimeLimit":
        return f"job {job.id} is {state}, so it was probably canceled: it is not requeued"
    if (answer := run_program("scontrol", "requeue", job.id)).ok:
        return f"job {job.id} is requeued; Slurm's line 'CANCELLED ... DUE TO JOB REQUEUE' is expected"
    script = re.search(r" Command=(/.*?) WorkDir=", job_record.text)
    return _refused(job, "scontrol requeue", answer.text, f"sbatch {script[1] if script else 'JOB_SCRIPT'}", run)


def _requeue_pbs(job: Job, run: str) -> str:
    """Reruns a PBS job; most servers permit this only to operators."""
    if job.variables.find("PBS_ENVIRONMENT") == "PBS_INTERACTIVE":
        return ""
    if (state := qstat_attributes(job).get("job_state", "R")) != "R":
        return f"job {job.id} is in state {state}: it is about to end, and is not requeued"
    if (answer := run_program("qrerun", job.id)).ok:
        return f"job {job.id} is requeued"
    return _refused(job, "qrerun", answer.text, "qsub JOB_SCRIPT", run)


def _field(job_record: str, name: str) -> str:
    """Returns a field of the output of `scontrol show job`; empty if the field is missing."""
    match = re.search(rf" {name}=(\S*)", job_record)
    return match[1] if match else ""


def _refused(job: Job, command: str, reason: str, submit: str, run: str) -> str:
    """Returns the message of a refused request, with the command that the user can type instead."""
    message = RequestError(
        f"to requeue job {job.id}, whose run was stopped before its end",
        f"{command} {job.id}: {reason}",
        f"{submit}\nThe run resumes from its last checkpoint if the job's command has --name {run}.",
    )
    return f"not requeued\n{message}"
