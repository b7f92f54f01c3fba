"""Submits, queries and cancels jobs of Flux. Does not import torch."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rankzero.distributed.scheduler.query import run_program
from rankzero.jobs.record import Record, State, joint_state

SUBMIT = "flux"
STOP = "flux cancel"
JOB_ID = r"^[fƒ]\w+"
"""Pattern of a job's id, with which the output of `flux batch` begins."""


def submit_command(script: Path) -> Sequence[str]:
    """Returns the command that submits a script, to be run in the folder of the runs."""
    return SUBMIT, "batch", str(script)


def state(record: Record) -> State:
    """Returns the state of a job."""
    answer = run_program("flux", "jobs", "-no", "{status}|{nodelist}|{runtime!F}|{duration!F}", record.id)
    if not answer.ok and not answer.text.endswith(" unknown"):
        return State("UNKNOWN", None, f"(flux jobs: {answer.text})")
    if not answer.ok:
        return State("ENDED", False, "(Flux no longer knows the job)")
    word, nodes, used, limit = (*answer.text.split("|"), "", "", "")[:4]
    found = joint_state([word], ("DEPEND", "PRIORITY", "SCHED", "RUN", "CLEANUP"), "COMPLETED")
    used += f" of {limit}" if limit not in ("", "0s") else ""
    return replace(found, details=f"on {nodes}, {used}") if nodes else found
