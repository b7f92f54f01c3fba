import time

import pytest

from rankzero.distributed.monitoring import monitor as monitor_module
from rankzero.distributed.monitoring.activity import DATA, END, FORWARD
from rankzero.distributed.monitoring.heartbeat import InFlight
from rankzero.distributed.monitoring.monitor import Monitor
from rankzero.distributed.monitoring.status import PauseDetector
from rankzero.distributed.timers import TIMERS
from running import wait_until


@pytest.fixture
def clock(monkeypatch):
    """The time that the monitor sees, in a list."""
    seconds = [1000.0]
    monkeypatch.setattr(monitor_module.time, "monotonic", lambda: seconds[0])
    return seconds


@pytest.fixture
def monitor(clock):
    """A monitor in training, with a limit of 30 seconds."""
    monitor = Monitor(terminate=lambda cause: None)
    monitor._pauses = PauseDetector(lambda: clock[0])
    monitor.start(30.0, True, InFlight)
    monitor.activity.enter(FORWARD)
    monitor.rank_zero_place = "backward at step 7"
    return monitor


def silence_after(monitor, clock, seconds, has_received=False, interval=2.0):
    """Returns the result of a call in each of the next seconds, without the empty ones."""
    results = []
    for _ in range(seconds):
        clock[0] += 1
        results.append(monitor.new_silence(has_received, interval))
    return [result for result in results if result]


def test_a_silence_of_rank_zero_is_described_once_and_may_be_as_long_as_the_interval_of_a_large_run(monitor, clock):
    silence_after(monitor, clock, 1, has_received=True)
    assert silence_after(monitor, clock, 30) == []
    assert silence_after(monitor, clock, 60) == [
        "has not reported for 31 s, since backward at step 7: its Python interpreter is blocked or suspended"
    ]
    silence_after(monitor, clock, 1, has_received=True)
    assert len(silence_after(monitor, clock, 60)) == 1
    silence_after(monitor, clock, 1, has_received=True, interval=30.0)
    assert silence_after(monitor, clock, 28 + int(TIMERS.silence), interval=30.0) == []
    assert len(silence_after(monitor, clock, 1, interval=30.0)) == 1


def test_rank_zero_may_be_silent_outside_training_and_during_a_pause_of_this_rank(monitor, clock):
    silence_after(monitor, clock, 1, has_received=True)
    clock[0] += 3600
    assert silence_after(monitor, clock, 30) == []
    monitor.activity.enter(END)
    assert silence_after(monitor, clock, 100) == []
    monitor.stop()
    assert silence_after(monitor, clock, 100) == []


def test_a_rank_has_a_status_only_in_training_and_drops_the_state_of_an_earlier_training(monitor):
    monitor.activity.begin_batch(7)
    assert monitor.status()[:2] == (7, DATA)
    monitor.activity.first_gradient = 0.1
    monitor.slow_ranks[1] = "slow"
    monitor.stop()
    assert monitor.status() is None
    monitor.start(30.0, True, InFlight)
    activity = monitor.activity
    assert (activity.step, activity.batches, activity.first_gradient, monitor.slow_ranks) == (0, 0, 0.0, {})


@pytest.mark.parametrize("stops_run", [True, False])
def test_a_single_process_watches_itself(monkeypatch, capsys, stops_run):
    monkeypatch.setattr(TIMERS, "heartbeat", 0.02)
    causes, recorded = [], []
    monitor = Monitor(causes.append)
    monitor.is_single_process, monitor.on_hang = True, recorded.append
    monitor.start(0.2, stops_run, InFlight)
    monitor.activity.begin_batch(0)
    monitor.activity.begin_batch(1)
    wait_until(lambda: recorded)
    time.sleep(0.1)
    monitor.stop()
    assert len(recorded) == 1 and "has been in data wait for 0 s at step 1" in recorded[0]
    assert causes == (recorded if stops_run else [])
    assert ("the run continues" in capsys.readouterr().err) is not stops_run
