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


def test_one_that_is_stopped_is_ended_and_the_others_are_not(asleep, capfd):
    stopped, other = asleep
    stopped.send_signal(signal.SIGSTOP)
    watching = threading.Thread(target=watch, args=("here", {0: other.pid, 3: stopped.pid}))
    watching.start()
    assert stopped.wait(20) == -signal.SIGKILL
    assert other.poll() is None
    other.kill()
    other.wait()
    watching.join(20)  # it leaves when nobody is left
    assert not watching.is_alive()
    assert "rank 3 on here was stopped (SIGSTOP)" in capfd.readouterr().err


def test_one_that_goes_on_in_time_is_left_alone(asleep):
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


def test_a_guard_that_was_stopped_itself_knows_nothing(asleep, monkeypatch):
    """As by Ctrl-Z, which stops all: time has passed, but nobody was left behind."""
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


def test_another_process_of_the_same_number_is_none_of_its_business(asleep, monkeypatch):
    stopped, _ = asleep
    births = iter(["1", "2"])
    monkeypatch.setattr(module, "_stat", lambda pid: ("T", next(births, "2")))
    watch("here", {0: stopped.pid})
    assert stopped.poll() is None
