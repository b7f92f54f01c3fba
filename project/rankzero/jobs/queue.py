"""Jobs that `submit` has recorded in a root, and what they tell about the status of runs. Does not import torch."""

import threading
import time
from collections.abc import Mapping, Sequence

from rankzero.distributed.timers import TIMERS
from rankzero.jobs.record import Record, State, submitted_at
from rankzero.runs.recorded_run import (
    FAILED,
    KILLED,
    RUNNING,
    STOPPED,
    SUMMARY_FILE,
    UNKNOWN,
    WAITING,
    RecordedRun,
    Status,
    modified_at,
)

MAX_QUERIES = 20
"""Number of jobs about which the scheduler is asked, the newest first."""

_WAITING_WORDS = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
    | {"QUEUED", "HELD", "WAITING", "PEND", "PSUSP", "DEPEND", "PRIORITY", "SCHED"}
)


def may_change_status(run: RecordedRun, status: Status, record: Record) -> bool:
    """Returns whether the state of a run's job may show another status than the files of the run."""
    if status.word == RUNNING:
        return False
    if status.word in (KILLED, UNKNOWN) or (status.word == STOPPED and run.summary.get("another_attempt")):
        return True
    return submitted_at(run.path.parent, record) > modified_at(run.path / SUMMARY_FILE)


def states_of(records: Sequence[Record]) -> dict[str, State]:
    """Returns the state of each job by the name of its run, without jobs whose scheduler does not answer in time."""
    from rankzero.jobs.schedulers import job_state

    states: dict[str, State] = {}

    def query(record: Record) -> None:
        states[record.name] = job_state(record)

    threads = [threading.Thread(target=query, args=(record,), daemon=True) for record in records[:MAX_QUERIES]]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + TIMERS.optional
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(states)


def status_with_job(run: RecordedRun, status: Status, record: Record, states: Mapping[str, State]) -> Status:
    """Returns the status of a run whose job was submitted, from its files and from the state of the job."""
    state = states.get(record.name)
    job = f"job {record.id} ({record.scheduler})"
    if state is None or state.is_active is None:
        answer = "the scheduler was not asked, or did not answer in time" if state is None else f"its state is {state}"
        return status if run.has_newest_summary else Status(status.word, _joined(status.note, f"{job}: {answer}"))
    if state.is_active:
        words = {part.split()[-1] for part in state.word.split(", ")}
        if words <= _WAITING_WORDS:
            return Status(WAITING, f"{job} is {state}")
        if status.word == KILLED or (status.word == UNKNOWN and run.attempts):
            return Status(status.word, _joined(status.note, f"{job} is {state}"))
        return Status(RUNNING, f"{job} is {state}; its attempt has not begun")
    if not run.attempts:
        return Status(FAILED, f"{job} has ended before the run began, see {record.name}.job.log")
    if status.word == UNKNOWN:
        return Status(KILLED, _joined(status.note, f"{job} has ended"))
    return status


def _joined(*notes: str) -> str:
    return "; ".join(filter(None, notes))
