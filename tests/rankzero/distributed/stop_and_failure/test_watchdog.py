import signal
import subprocess
import threading
import time

import pytest

from rankzero.distributed.stop_and_failure import watchdog
from rankzero.distributed.stop_and_failure.watchdog import monitor_ranks


@pytest.fixture
def sleeping_processes():
    processes = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def monitor(ranks):
    monitor_ranks("here", ranks, stopped_seconds=0.8, poll_seconds=0.05)


@pytest.fixture
def monitored(sleeping_processes):
    """A process that a watchdog monitors and must not kill."""
    process, _ = sleeping_processes
    monitoring = threading.Thread(target=monitor, args=({0: process.pid},))
    monitoring.start()
    yield process
    assert process.poll() is None
    process.kill()
    process.wait()
    monitoring.join(20)


def test_only_a_suspended_rank_is_killed(sleeping_processes, capfd):
    stopped, running = sleeping_processes
    stopped.send_signal(signal.SIGSTOP)
    monitoring = threading.Thread(target=monitor, args=({0: running.pid, 3: stopped.pid},))
    monitoring.start()
    assert stopped.wait(20) == -signal.SIGKILL
    assert running.poll() is None
    running.kill()
    running.wait()
    monitoring.join(20)  # the watchdog exits after the last rank
    assert not monitoring.is_alive()
    assert "rank 3 on here was suspended (SIGSTOP)" in capfd.readouterr().err


def test_a_suspended_rank_that_continues_in_time_is_not_killed(monitored):
    for _ in range(3):
        monitored.send_signal(signal.SIGSTOP)
        time.sleep(0.3)
        monitored.send_signal(signal.SIGCONT)
        time.sleep(0.2)


def test_a_rank_is_not_killed_if_the_watchdog_was_suspended_too(monitored, monkeypatch):
    """Ctrl-Z suspends all processes: time passes, but no rank has waited for another."""
    skew, real = [0.0], time.monotonic
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: real() + skew[0])
    monitored.send_signal(signal.SIGSTOP)
    time.sleep(0.3)
    skew[0] = 3600.0
    time.sleep(0.3)
    monitored.send_signal(signal.SIGCONT)
    time.sleep(1.2)


def test_a_process_with_a_reused_process_id_is_not_killed(sleeping_processes, monkeypatch):
    stopped, _ = sleeping_processes
    start_times = iter(["1", "2"])
    monkeypatch.setattr(watchdog, "_stat", lambda pid: ("T", next(start_times, "2")))
    monitor({0: stopped.pid})
    assert stopped.poll() is None
