"""Only one start at a time trains a run. Processes act as other starts, and another boot id acts as another host."""

import json
import multiprocessing
import os
import signal
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from checkpoint_files import names

from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.process.system import process_state
from rankzero.distributed.timers import TIMERS
from rankzero.messages import RequestError
from rankzero.runs import lock as run_lock
from rankzero.runs.lock import Owner, RunLock
from recorded_runs import locked, suspend, write_lock


@pytest.fixture
def run(tmp_path):
    return tmp_path / "runs/x"


@pytest.fixture
def lock_file(run):
    return run.parent / ".x.lock"


@pytest.fixture
def other_process(run):
    """Returns a function that starts a process that keeps the lock, and returns it and a queue for its answer."""
    context = multiprocessing.get_context("fork")
    started = []

    def lock_run(answer, launch):
        try:
            RunLock(launch).acquire(run)
        except RequestError as error:
            answer.put(str(error))
        else:
            answer.put("held")
            signal.pause()

    def start(launch=None):
        answer = context.SimpleQueue()
        started.append(context.Process(target=lock_run, args=(answer, launch or Launch())))
        started[-1].start()
        return started[-1], answer

    yield start
    for process in started:
        process.kill()
        process.join()


@pytest.fixture
def owner(other_process):
    process, answer = other_process()
    assert answer.get() == "held"
    return process


ENDED = {"born": "1"}
ANOTHER_HOST = {**ENDED, "pid": 4711, "host": "elsewhere", "boot": "another kernel"}


@pytest.mark.parametrize("exists", [False, True])
def test_the_lock_describes_its_owner_and_is_removed_on_release(run, lock_file, exists):
    if exists:
        run.parent.mkdir()
    lock = RunLock(Launch(job_id="7", restarts=2))
    lock.acquire(run)
    content = json.loads(lock_file.read_text())
    assert (content["pid"], content["job"], content["restarts"]) == (os.getpid(), "7", 2)
    assert names(run.parent) == [".x.lock"]
    lock.release()
    lock.release()
    assert names(run.parent) == [] if exists else not run.parent.exists()  # `acquire` created this folder


def test_the_refusal_of_a_second_start_names_the_owner_even_if_it_is_suspended(run, owner):
    with pytest.raises(RequestError) as error:
        RunLock(Launch()).acquire(run)
    assert error.value.asked == "to train run x"
    assert f"process {owner.pid} on {Owner.this(Launch()).host} has been training run x since 20" in error.value.found
    assert error.value.instead == f"--name ANOTHER-NAME, or first stop that process: kill {owner.pid}"
    assert names(run.parent) == [".x.lock"]
    suspend(owner.pid)
    with pytest.raises(RequestError, match=f"kill -CONT {owner.pid} resumes it"):
        RunLock(Launch()).acquire(run)


def test_the_lock_of_a_killed_process_can_be_taken_also_if_its_process_id_was_reused(run, lock_file, owner):
    owner.kill()
    while (state := process_state(owner.pid)) and state[0] != "Z":
        time.sleep(0.01)  # a zombie process counts as ended
    for _ in range(2):
        with locked(run, notify=pytest.fail):
            assert json.loads(lock_file.read_text())["pid"] == os.getpid() and names(run.parent) == [".x.lock"]
        assert names(run.parent) == []
        write_lock(run, **ENDED)


@pytest.mark.parametrize("before", ["nothing", "a killed owner", "a killed successor too", "a damaged file"])
def test_only_one_of_many_concurrent_starts_gets_the_lock(run, lock_file, before, other_process, monkeypatch):
    monkeypatch.setattr(TIMERS, "lock_stale", 0.2)
    monkeypatch.setattr(TIMERS, "slow_poll", 0.05)
    run.parent.mkdir()
    if before == "a damaged file":
        lock_file.write_text("")
    elif before != "nothing":
        write_lock(run, **ENDED)
    if before == "a killed successor too":
        token = json.loads(lock_file.read_text())["token"]
        write_lock(run, **ENDED, token="f" * 32).rename(f"{lock_file}.{token}")
        write_lock(run, **ENDED, token=token)
    answers = [other_process()[1] for _ in range(8)]
    found = [answer.get() for answer in answers]
    assert all(text == "held" or "training run x" in text for text in found)
    assert found.count("held") == 1 and names(run.parent) == [".x.lock"]


def test_a_start_is_refused_while_an_owner_on_another_host_sends_heartbeats(run, lock_file, monkeypatch):
    since, notes = json.loads(write_lock(run, **ANOTHER_HOST).read_text())["since"], []
    clock = SimpleNamespace(monotonic=time.monotonic, time=time.time, sleep=lambda _: os.utime(lock_file))
    monkeypatch.setattr(run_lock, "time", clock)
    with pytest.raises(RequestError, match="process 4711 on elsewhere has been training run x") as error:
        RunLock(Launch(), notify=notes.append).acquire(run)
    assert error.value.instead.endswith("kill 4711 on elsewhere")
    assert notes == [f"run x belongs to process 4711 on elsewhere since {since}; waiting 60 s for its heartbeat"]


def test_the_lock_of_an_owner_on_another_host_is_taken_without_heartbeats_or_when_it_is_released(
    run, lock_file, monkeypatch
):
    monkeypatch.setattr(TIMERS, "lock_stale", 0.3)
    monkeypatch.setattr(TIMERS, "slow_poll", 0.05)
    write_lock(run, **ANOTHER_HOST)
    os.utime(lock_file, (time.time() + 9000, time.time() + 9000))  # the clock of the other host is wrong
    notes = []
    with locked(run, notify=notes.append):
        assert len(notes) == 1 and json.loads(lock_file.read_text())["host"] == Owner.this(Launch()).host
    monkeypatch.setattr(TIMERS, "lock_stale", 60)
    write_lock(run, **ANOTHER_HOST)
    with locked(run, notify=lambda line: lock_file.unlink()):
        pass
    write_lock(run, **ANOTHER_HOST)
    with pytest.raises(RequestError, match="SIGINT ended the wait for its heartbeat"):
        RunLock(Launch(), received_signal=lambda: "SIGINT").acquire(run)
    assert names(run.parent) == [".x.lock"]


def test_the_owner_sends_heartbeats_and_changes_no_files_of_other_runs(run, lock_file, monkeypatch):
    monkeypatch.setattr(TIMERS, "lock_heartbeat", 0.01)
    run.parent.mkdir()
    for name in (".x.lock.lock", ".x.lock-2", ".xy.lock", ".x.lock.before-1"):
        (run.parent / name).write_text("{}")
    before = names(run.parent)
    with locked(run):
        first_heartbeat = lock_file.stat().st_mtime_ns
        while lock_file.stat().st_mtime_ns == first_heartbeat:
            time.sleep(0.01)
    assert names(run.parent) == before


SAME_JOB = {
    "requeued": (Launch(job_id="7"), Launch(job_id="7", restarts=1), True),
    "torchrun after a loss": (Launch(job_id="7"), Launch(job_id="7", elastic="--nnodes 1:2"), True),
    "two steps of a job": (Launch(job_id="7"), Launch(job_id="7"), False),
    "another job": (Launch(job_id="7"), Launch(job_id="8", restarts=3), False),
    "by hand": (Launch(), Launch(restarts=1), False),
}


@pytest.mark.parametrize("case", SAME_JOB)
def test_a_restarted_job_takes_over_only_its_own_run(run, lock_file, case, other_process):
    first, second, takes_over = SAME_JOB[case]
    _, answer = other_process(first)
    assert answer.get() == "held"
    lock = RunLock(second)
    with nullcontext() if takes_over else pytest.raises(RequestError):
        lock.acquire(run)
    assert (json.loads(lock_file.read_text())["pid"] == os.getpid()) == takes_over
    lock.release()


def test_an_owner_that_was_replaced_does_not_release_its_successors_lock(run, lock_file):
    first = RunLock(Launch(job_id="7"))
    first.acquire(run)
    second = RunLock(Launch(job_id="7", restarts=1))
    second.acquire(run)
    before = lock_file.read_text()
    first.release()
    assert lock_file.read_text() == before and names(run.parent) == [".x.lock"]
    second.release()
    assert names(run.parent) == []


def test_a_symbolic_link_to_a_run_has_the_lock_of_the_run(run, tmp_path):
    (tmp_path / "real/x").mkdir(parents=True)
    run.parent.mkdir()
    run.symlink_to(tmp_path / "real/x")
    with locked(run), pytest.raises(RequestError):
        RunLock(Launch()).acquire(tmp_path / "real/x")
