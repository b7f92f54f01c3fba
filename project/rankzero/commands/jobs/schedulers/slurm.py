"""Submits, queries and cancels jobs of Slurm. Does not import torch."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rankzero.commands.jobs.record import Record
from rankzero.commands.jobs.schedulers.state import State
from rankzero.distributed.scheduler.query import run_program

SUBMIT = "sbatch"
STOP = "scancel"

_ENDED = (
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
)


def submit_command(script: Path) -> Sequence[str]:
    """Returns the command that submits a script, to be run in the folder of the runs."""
    return SUBMIT, "--parsable", str(script)


def job_id(output: str) -> str | None:
    """Returns the id of the job in the output of sbatch; None if there is none."""
    match = re.match(r"[0-9]+", output)
    return match[0] if match else None


def state(record: Record) -> State:
    """Returns the state of a job."""
    answer = run_program("squeue", "--noheader", f"--jobs={record.id}", "--states=all", "--format=%T|%r|%M|%l|%N")
    if not answer.ok:
        if "Invalid job id" in answer.text:
            return State("no longer known to Slurm", False)
        return State(f"unknown: {answer.text}", None)
    rows = [line.split("|") for line in answer.text.splitlines()]
    if not rows:
        return State("no longer known to Slurm", False)
    is_active = any(row[0] not in _ENDED for row in rows)
    if len(rows) > 1:  # a job array
        return State(", ".join(f"{count} {word}" for word, count in Counter(row[0] for row in rows).items()), is_active)
    word, reason, used, limit, nodes = (*rows[0], "", "", "", "")[:5]
    if word == "PENDING":
        return State(word if reason in ("", "None") else f"{word} ({reason})", True)
    return State(f"{word} on {nodes}, {used} of {limit}" if nodes else word, is_active)


def stop_command(record: Record) -> Sequence[str]:
    """Returns the command that ends a job with SIGTERM."""
    return STOP, record.id


def supports_expedite() -> bool:
    """Returns whether this Slurm has `--requeue=expedite` (25.11 and newer)."""
    answer = run_program(SUBMIT, "--version")
    match = re.search(r"([0-9]+)\.([0-9]+)", answer.text) if answer.ok else None
    return match is not None and (int(match[1]), int(match[2])) >= (25, 11)
