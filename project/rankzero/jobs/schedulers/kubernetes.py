"""Creates, queries and deletes TrainJobs of Kubeflow. Does not import torch."""

from collections.abc import Sequence
from pathlib import Path

from rankzero.distributed.scheduler.query import run_program
from rankzero.jobs.record import Record, State

SUBMIT = "kubectl"
STOP = "kubectl delete --wait=false --cascade=foreground trainjob"
JOB_ID = r"(?<=/)[a-z0-9-]+"
"""Pattern of a job's id, which is its name, in the output of kubectl."""

_FIELDS = '{.status.conditions[?(@.status=="True")].type}|{.status.jobsStatus[*].ready}'


def log_command(name: str) -> str:
    """Returns the command that prints the output of a run's first machine."""
    return f"kubectl logs --follow job/{name}-node-0"


def submit_command(script: Path) -> Sequence[str]:
    """Returns the command that creates a TrainJob, after it has deleted an ended one of this name."""
    return SUBMIT, "replace", "--force", "--cascade=foreground", "-f", str(script)


def state(record: Record) -> State:
    """Returns the state of a TrainJob."""
    answer = run_program("kubectl", "get", "trainjob", record.id, "-o", f"jsonpath={_FIELDS}")
    if not answer.ok and "NotFound" not in answer.text:
        return State("UNKNOWN", None, f"(kubectl: {answer.text.splitlines()[-1]})")
    if not answer.ok:
        return State("ENDED", False, "(Kubernetes no longer knows the job)")
    conditions, _, ready = answer.text.partition("|")
    for condition, word in (("Failed", "FAILED"), ("Complete", "COMPLETED")):
        if condition in conditions.split():
            return State(word, False, has_failed=condition == "Failed")
    if "Suspended" in conditions.split():
        return State("QUEUED", True)
    return State("RUNNING" if ready.strip("0 ") else "PENDING", True)
