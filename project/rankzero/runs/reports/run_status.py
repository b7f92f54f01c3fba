"""Status of a run, from its files and its lock. Does not import torch."""

import time
from dataclasses import dataclass
from pathlib import Path

from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.process.process_state import process_state
from rankzero.distributed.rendezvous.peers import Peer
from rankzero.distributed.timers import TIMERS
from rankzero.runs.lock import Owner, current_owner, last_heartbeat, lock_path
from rankzero.runs.reports.recorded_run import RecordedRun
from rankzero.runs.reports.text import age

RUNNING, WAITING, FINISHED, STOPPED, FAILED = "running", "waiting", "finished", "stopped", "failed"
KILLED, UNKNOWN = "killed", "unknown"


@dataclass(frozen=True)
class Status:
    """Status of a run."""

    word: str
    note: str = ""


def status_of(run: RecordedRun, now: float | None = None) -> Status:
    """Returns the status of a run, as far as it can be known on this host.

    An attempt without a summary is running if the owner of the run's lock is alive. A process on this host can be
    inspected. A process on another host counts as running if its last heartbeat is recent; otherwise it was killed, it
    is suspended, or the clocks of the hosts differ.
    """
    now = time.time() if now is None else now
    owner, file = current_owner(lock_path(run.path))
    if owner is not None:
        on_this_host = owner.pid > 0 and owner.is_on_host_of(Peer.this(Launch()))
        status = _on_this_host(owner) if on_this_host else _on_another_host(owner, file, now)
        if status.word == RUNNING or not run.has_newest_summary:
            return status
    if run.has_newest_summary:
        return Status(run.status, run.problem or run.note)
    if run.problem:
        return Status(UNKNOWN, run.problem)
    if not run.attempts:
        return Status(UNKNOWN, "no attempt is recorded")
    host = f" on {run.host}" if run.host else ""
    return Status(UNKNOWN, f"attempt {run.attempts}{host} has neither a lock nor a summary")


def _on_this_host(owner: Owner) -> Status:
    process = process_state(owner.pid)
    if process is None or process[1] != owner.born or process[0] in ("Z", "X"):
        return Status(KILLED, f"process {owner.pid} on {owner.host} has ended without a summary")
    if process[0] == "T":
        return Status(RUNNING, f"process {owner.pid} is suspended (SIGSTOP); kill -CONT {owner.pid} resumes it")
    return Status(RUNNING)


def _on_another_host(owner: Owner, file: Path, now: float) -> Status:
    heartbeat = last_heartbeat(file)
    silence = now - heartbeat / 1e9 if heartbeat is not None else 0.0
    if silence <= TIMERS.lock_stale:
        return Status(RUNNING)
    process = f"process {owner.pid} on {owner.host}" if owner.pid else "a process"
    return Status(UNKNOWN, f"no heartbeat of {process} for {age(silence)}: killed, suspended, or the clocks differ")
