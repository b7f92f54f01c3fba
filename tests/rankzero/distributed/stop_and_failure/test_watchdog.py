import signal
import subprocess
import threading
import time

import pytest

from rankzero.distributed.stop_and_failure import watchdog as module
from rankzero.distributed.stop_and_failure.watchdog import watch


@pytest.fixture
def asleep():
    processes = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    yield processes
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch):
    monkeypatch.setattr(module, "STOPPED_SECONDS", 0.8)
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.05)


def test_only_a_suspended_rank_is_killed(asleep, capfd):
    stopped, other = asleep
    stopped.send_signal(signal.SIGSTOP)
    watching = threading.Thread(target=watch, args=("here", {0: other.pid, 3: stopped.pid}))
    watching.start()
    assert stopped.wait(20) == -signal.SIGKILL
    assert other.poll() is None
    other.kill()
    other.wait()
    watching.join(20)  # the watchdog exits after the last rank
    assert not watching.is_alive()
    assert "rank 3 on here was stopped (SIGSTOP)" in capfd.readouterr().err


def test_a_suspended_rank_that_continues_in_time_is_not_killed(asleep):
    stopped, _ = asleep
    watching = threading.Thread(target=watch, args=("here", {0: stopped.pid}))
    watching.start()
    for _ in range(4):
        stopped.send_signal(signal.SIGSTOP)
        time.sleep(0.3)
        stopped.send_signal(signal.SIGCONT)
        time.sleep(0.2)
    assert stopped.poll() is None
    stopped.kill()
    stopped.wait()
    watching.join(20)


def test_a_rank_is_not_killed_if_the_watchdog_was_suspended_too(asleep, monkeypatch):
    """Ctrl-Z suspends all processes: time passes, but no rank has waited for another."""
    stopped, _ = asleep
    clock = {"skew": 0.0}
    real = time.monotonic
    monkeypatch.setattr(module.time, "monotonic", lambda: real() + clock["skew"])
    stopped.send_signal(signal.SIGSTOP)
    watching = threading.Thread(target=watch, args=("here", {0: stopped.pid}))
    watching.start()
    time.sleep(0.3)
    clock["skew"] = 3600.0
    time.sleep(0.3)
    stopped.send_signal(signal.SIGCONT)
    time.sleep(1.2)
    assert stopped.poll() is None
    stopped.kill()
    stopped.wait()
    watching.join(20)


def test_a_process_with_a_reused_process_id_is_not_killed(asleep, monkeypatch):
    stopped, _ = asleep
    births = iter(["1", "2"])
    monkeypatch.setattr(module, "_stat", lambda pid: ("T", next(births, "2")))
    watch("here", {0: stopped.pid})
    assert stopped.poll() is None
