"""Submits, queries and deletes jobs of PBS. Does not import torch."""

import re
from collections.abc import Sequence
from pathlib import Path

from rankzero.distributed.connections.key import KEY_VARIABLE, has_key_variable
from rankzero.distributed.scheduler.query import run_program
from rankzero.jobs.record import Record, State

SUBMIT = "qsub"
STOP = "qdel"
JOB_ID = r"^[0-9]+(\[\])?(\.\S+)?"
"""Pattern of a job's id, with which the output of qsub begins."""

_WORDS = {"B": "RUNNING (array)", "E": "EXITING", "F": "FINISHED", "H": "HELD", "M": "MOVED", "Q": "QUEUED"}
_WORDS |= {"R": "RUNNING", "S": "SUSPENDED", "T": "MOVING", "U": "SUSPENDED", "W": "WAITING", "X": "FINISHED"}
"""Value of PBS's `job_state` -> the word that is shown."""


def submit_command(script: Path) -> Sequence[str]:
    """Returns the command that submits a script, to be run in the folder of the runs."""
    return SUBMIT, *(("-v", KEY_VARIABLE) if has_key_variable() else ()), str(script)


def state(record: Record) -> State:
    """Returns the state of a job."""
    answer = run_program("qstat", "-f", record.id)
    if not answer.ok and not re.search("Unknown Job|has finished", answer.text):
        return State("UNKNOWN", None, f"(qstat: {answer.text.removeprefix('qstat: ')})")
    if not answer.ok:  # ended jobs need `qstat -x`, which a server without a history of jobs refuses
        answer = run_program("qstat", "-x", "-f", record.id)
    if not answer.ok:
        return State("ENDED", False, "(PBS no longer knows the job)")
    attributes = dict(re.findall(r"^ +([\w.]+) = (.*)$", answer.text.replace("\n\t", ""), re.MULTILINE))
    letter: str = attributes.get("job_state", "")
    if not letter:
        return State("UNKNOWN", None)
    word, is_active, details = str(_WORDS.get(letter, letter)), letter not in ("F", "X"), ""
    if letter == "R" and "exec_host" in attributes:
        hosts = dict.fromkeys(re.findall(r"([^/+]+)/", attributes["exec_host"]))
        details = f"on {', '.join(hosts)}"
        if "Resource_List.walltime" in attributes:
            used = attributes.get("resources_used.walltime", "0")
            details += f", {used} of {attributes['Resource_List.walltime']}"
    elif "comment" in attributes and letter in "QHW":
        details = f"({attributes['comment']})"
    return State(word, is_active, details, None if is_active else attributes.get("Exit_status", "0") != "0")
