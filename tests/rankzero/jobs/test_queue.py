import threading

import pytest

from rankzero.distributed.timers import TIMERS
from rankzero.jobs import queue
from rankzero.jobs.queue import states_of, status_with_job
from rankzero.jobs.record import Record, State
from rankzero.runs.recorded_run import RecordedRun, Status

JOB = Record("a", "slurm", "srun", "12")


def test_the_scheduler_is_asked_about_each_job_up_to_a_number_and_for_a_limited_time(programs, monkeypatch):
    programs(squeue='echo "PENDING|Priority|0:00|1:00|"')
    assert states_of([JOB]) == {"a": State("PENDING", True, "(Priority)")}
    monkeypatch.setattr("rankzero.jobs.schedulers.job_state", lambda record: State("PENDING", True))
    records = [Record(f"r{number}", "slurm", None, str(number)) for number in range(queue.MAX_QUERIES + 5)]
    assert list(states_of(records)) == [record.name for record in records[: queue.MAX_QUERIES]]
    answer = threading.Event()
    monkeypatch.setattr(TIMERS, "optional", 0.05)
    monkeypatch.setattr("rankzero.jobs.schedulers.job_state", lambda record: answer.wait(60))
    assert states_of([JOB]) == {}
    answer.set()


@pytest.mark.parametrize(
    ("word", "attempts", "state", "expected", "note"),
    [
        ("unknown", 0, State("PENDING", True, "(Priority)"), "waiting", "job 12 (slurm) is PENDING (Priority)"),
        ("unknown", 0, State("2 PENDING, 1 REQUEUED", True), "waiting", ""),
        *(("unknown", 0, State(word, True), "waiting", "") for word in ("PEND", "SCHED", "2 PEND, 1 PSUSP")),
        ("unknown", 0, State("1 PENDING, 1 RUNNING", True), "running", ""),
        ("unknown", 0, State("ENDED", False), "failed", "see a.job.log"),
        ("unknown", 0, State("UNKNOWN", None, "(squeue: not found on PATH)"), "unknown", "squeue: not found"),
        ("unknown", 1, State("ENDED", False), "killed", ""),
        ("unknown", 1, State("RUNNING", True), "unknown", ""),
        ("killed", 1, State("RUNNING", True), "killed", ""),
        ("killed", 1, State("REQUEUED", True), "waiting", ""),
        ("killed", 1, None, "killed", ""),
    ],
)
def test_the_state_of_the_job_completes_the_status(tmp_path, word, attempts, state, expected, note):
    run = RecordedRun(tmp_path / "a", {"attempts": attempts * [{}]})
    status = status_with_job(run, Status(word), JOB, {"a": state} if state else {})
    assert status.word == expected and "job 12 (slurm)" in status.note and note in status.note
