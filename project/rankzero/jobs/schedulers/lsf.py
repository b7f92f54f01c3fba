"""Submits, queries and kills jobs of LSF. Does not import torch."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rankzero.distributed.scheduler.query import run_program
from rankzero.jobs.record import Record, State, joint_state

SUBMIT = "bsub"
STOP = "bkill"
JOB_ID = r"(?<=^Job <)[0-9]+"
"""Pattern of a job's id in the output of bsub."""

_ACTIVE = ("PEND", "PROV", "PSUSP", "RUN", "SSUSP", "UNKWN", "USUSP", "WAIT", "ZOMBI")
"""States of jobs that wait or run."""


def submit_command(script: Path) -> Sequence[str]:
    """Returns the command that submits the script on its standard input; bsub reads no options from a named script."""
    return (SUBMIT,)


def state(record: Record) -> State:
    """Returns the state of a job."""
    answer = run_program("bjobs", "-noheader", "-o", "stat exec_host time_left delimiter='|'", record.id)
    is_unknown = re.search("is not found|No matching job", answer.text) or (answer.ok and not answer.text)
    if not answer.ok and not is_unknown:
        return State("UNKNOWN", None, f"(bjobs: {answer.text})")
    rows = [line.split("|") for line in answer.text.splitlines() if line.count("|") == 2]
    if not rows:
        return State("ENDED", False, "(LSF no longer knows the job)")
    found = joint_state([row[0] for row in rows], _ACTIVE, "DONE")
    if len(rows) > 1 or rows[0][0] != "RUN":
        return found
    _, hosts, left = rows[0]
    names = ", ".join(dict.fromkeys(host.rpartition("*")[2] for host in hosts.split(":")))
    return replace(found, details=f"on {names}, {left.split()[0]} left" if left.strip(" -") else f"on {names}")
