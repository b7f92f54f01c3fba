"""Submits, queries and cancels jobs of Slurm. Does not import torch."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rankzero.distributed.scheduler.query import run_program
from rankzero.jobs.record import Record, State, joint_state

SUBMIT = "sbatch"
STOP = "scancel"
JOB_ID = r"^[0-9]+"
"""Pattern of a job's id, with which the output of sbatch begins."""

_ACTIVE = (
    *("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT"),
    *("REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT"),
)
"""States of jobs that wait or run."""


def submit_command(script: Path) -> Sequence[str]:
    """Returns the command that submits a script, to be run in the folder of the runs."""
    return SUBMIT, "--parsable", str(script)


def state(record: Record) -> State:
    """Returns the state of a job."""
    answer = run_program("squeue", "--noheader", f"--jobs={record.id}", "--states=all", "--format=%T|%r|%M|%l|%N")
    if not answer.ok and "Invalid job id" not in answer.text:
        return State("UNKNOWN", None, f"(squeue: {answer.text.removeprefix('squeue: ')})")
    rows = [line.split("|") for line in answer.text.splitlines()] if answer.ok else []
    if not rows:
        return State("ENDED", False, "(Slurm no longer knows the job)")
    found = joint_state([row[0] for row in rows], _ACTIVE, "COMPLETED")
    if len(rows) > 1:  # a job array
        return found
    word, reason, used, limit, nodes = (*rows[0], "", "", "", "")[:5]
    if word == "PENDING":
        return State(word, True, "" if reason in ("", "None") else f"({reason})")
    return replace(found, details=f"on {nodes}, {used} of {limit}" if nodes else "")
