import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.monitoring import activity, hangs
from rankzero.distributed.monitoring import monitor as monitor_module
from rankzero.distributed.monitoring.hangs import ReportSchedule, Status, describe_hang, report_interval
from rankzero.distributed.monitoring.monitor import Heartbeat, InFlight, Monitor
from rankzero.distributed.monitoring.stacks import WAITING_FUNCTIONS, main_thread_frames, waiting_function
from rankzero.distributed.stop_and_failure.exchange import Exchange
from rankzero.distributed.timers import TIMERS
from rankzero.distributed.world import World
from running import wait_until

QUICK = Status(5, "backward", 0.1, 300.0)
URGENT = Status(5, "backward", 160.0, 300.0)


class Observed:
    """An activity and its heartbeat, on a clock that the test advances."""

    def __init__(self, monkeypatch, timeout=20.0, collective=InFlight):
        self.seconds = 100.0
        for module in (activity, hangs, monitor_module):
            monkeypatch.setattr(module, "monotonic", lambda: self.seconds)
        self.activity = activity.Activity()
        self.heartbeat = Heartbeat(self.activity, timeout, collective)

    def status_after(self, seconds):
        """Returns the status after this time, with a heartbeat in each second."""
        for _ in range(int(seconds)):
            self.seconds += 1
            status = self.heartbeat.status()
        return status


def test_only_training_is_limited_and_the_limit_grows_by_its_longest_phase(monkeypatch):
    run = Observed(monkeypatch)
    assert run.status_after(3) is None
    assert run.status_after(60)[:4] == (0, activity.START, 63.0, 20.0)
    run.activity.enter(activity.FORWARD)
    assert run.status_after(8).phase == activity.FORWARD
    run.activity.enter(activity.DATA)
    run.status_after(3)
    assert run.heartbeat.limit == 28
    run.activity.enter(activity.END)
    assert run.status_after(60) is None
    run.activity.enter(activity.DATA)
    run.status_after(1)
    assert run.heartbeat.limit == 28


@pytest.mark.parametrize("phase", [activity.VALIDATION, activity.SANITY_CHECK, activity.FORWARD])
def test_the_first_batch_and_each_validation_may_take_longer(monkeypatch, phase):
    run = Observed(monkeypatch)
    run.activity.enter(activity.HOOK)
    assert run.status_after(1).may_take_longer
    run.activity.begin_batch(0)
    run.activity.enter(phase)
    assert run.status_after(1).may_take_longer
    run.activity.begin_batch(1)
    run.activity.enter(phase)
    assert run.status_after(1).may_take_longer is (phase != activity.FORWARD)


def test_details_are_determined_only_for_a_long_phase(monkeypatch):
    calls = []
    run = Observed(monkeypatch, collective=lambda: calls.append(1) or InFlight(7, "all_reduce of 3 values"))
    run.activity.enter(activity.BACKWARD)
    assert run.status_after(3).waits_in == "" and not calls
    status = run.status_after(2)
    assert (status.sequence, status.waits_in) == (7, "all_reduce of 3 values")


@pytest.mark.parametrize(
    ("error", "waits_in"), [(NotImplementedError, "a collective"), (RuntimeError("CUDA error: device-side assert"), "")]
)
def test_a_backward_pass_waits_without_a_record_of_collectives_but_not_after_an_error(monkeypatch, error, waits_in):
    run = Observed(monkeypatch, collective=Mock(side_effect=error))
    for phase, expected in ((activity.START, ""), (activity.BACKWARD, waits_in), (activity.FORWARD, "")):
        run.activity.enter(phase)
        assert run.status_after(5).waits_in == expected


def test_a_rank_whose_gpu_has_not_begun_the_collective_is_the_cause_of_the_hang(monkeypatch):
    run = Observed(monkeypatch, collective=lambda: InFlight(7, awaits_gpu=True))
    monkeypatch.setattr(monitor_module, "current_user_position", lambda frames: "train.py:34 in training_step")
    run.activity.begin_batch(812)
    run.activity.begin_batch(813)
    run.activity.enter(activity.BACKWARD)
    waiting = Status(813, activity.BACKWARD, 22.0, 20.0, waits_in="all_reduce of 3 values")
    assert describe_hang({0: waiting, 1: run.status_after(22)}, {}, ["n1", "n2"]).startswith(
        "rank 1 on n2 has been in backward for 22 s at step 813 (train.py:34 in training_step, where the CPU waits for "
        "the GPU); rank 0 in backward"
    )


def test_on_one_gpu_the_line_is_where_the_cpu_waits_unless_the_main_thread_waits_for_other_ranks(monkeypatch):
    run = Observed(monkeypatch, collective=lambda: InFlight(awaits_gpu=True))
    monkeypatch.setattr(monitor_module, "current_user_position", lambda frames: "")
    run.activity.enter(activity.FORWARD)
    assert run.status_after(5).position == "the CPU waits for the GPU"
    monkeypatch.setattr(monitor_module, "waiting_function", lambda frames: "an exchange between all ranks")
    assert run.status_after(5)[5:8] == ("an exchange between all ranks", 0, "")


def test_neither_a_debugger_nor_time_during_which_the_process_was_stopped_counts(monkeypatch):
    run = Observed(monkeypatch)
    run.activity.enter(activity.FORWARD)
    run.status_after(2)
    run.seconds += 3600
    assert run.heartbeat.status().age == 0
    assert run.status_after(3).age == 3
    monkeypatch.setattr(monitor_module, "is_in_debugger", lambda frames: True)
    assert run.status_after(5).limit is None


@pytest.mark.parametrize(("phase", "compiles"), [(activity.FORWARD, True), (activity.CHECKPOINT, False)])
def test_a_compilation_or_a_checkpoint_is_a_hang_after_five_times_the_limit(monkeypatch, phase, compiles):
    run = Observed(monkeypatch)
    monkeypatch.setattr(monitor_module, "is_compiling", lambda frames: compiles)
    run.activity.enter(phase)
    waiting = Status(0, activity.BACKWARD, 99.0, 20.0, waits_in="all_reduce of 3 values")
    assert describe_hang({0: run.status_after(99), 1: waiting}, {}, ["n1", "n1"]) == ""
    assert f"rank 0 on n1 has been in {phase}" in describe_hang({0: run.status_after(2), 1: waiting}, {}, ["n1", "n1"])


def test_a_status_is_reported_on_request_or_at_once_with_the_next_one_if_it_may_become_a_hang():
    for status in (QUICK, Status(5, "backward", 100.0, 300.0), None, Status(5, "backward", 1e4, None)):
        schedule = ReportSchedule()
        assert [schedule.is_due(status, requested) for requested in (False, True, False, True)] == [False, True] * 2
    schedule = ReportSchedule()
    due = [schedule.is_due(status, False) for status in (QUICK, URGENT, URGENT, QUICK, QUICK)]
    assert due == [False, True, True, True, False]


def test_a_rank_in_an_exchange_waits_for_other_ranks():
    assert all(Path(file).exists() for file in WAITING_FUNCTIONS)
    world, found = World(Launch(rank=1, world_size=2)), []
    exchange = Exchange(world, lambda message: None, lambda message: None, lambda: None)

    def decide_on_rank_zero():
        found.append(waiting_function(main_thread_frames()))
        exchange.receive(1, {"decision": 7})

    threading.Timer(0.1, decide_on_rank_zero).start()
    assert exchange.decide(1, list, 10, "building data and model") == 7
    assert found == ["an exchange between all ranks (building data and model)"]


def test_the_interval_grows_with_the_nodes_up_to_a_limit_and_a_rank_may_miss_some_seconds_of_reports():
    seconds = {1: 2, 40: 2, 128: 6.4, 1200: 60, 32768: 60}
    assert {nodes: report_interval(nodes) for nodes in seconds} == seconds
    assert monitor_module.silence_seconds(2.0) == TIMERS.silence
    assert monitor_module.silence_seconds(60.0) > 60.0 + 9.0  # the watchdog acts within 9 s


@pytest.fixture
def clock(monkeypatch):
    """The time that the monitor sees, in a list."""
    seconds = [1000.0]
    for module in (hangs, monitor_module):
        monkeypatch.setattr(module, "monotonic", lambda: seconds[0])
    return seconds


@pytest.fixture
def monitor(clock):
    """A monitor in training, with a limit of 30 seconds."""
    monitor = Monitor(terminate=lambda cause: None)
    monitor.start(30.0, True, InFlight)
    monitor.activity.enter(activity.FORWARD)
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
    monitor.activity.enter(activity.END)
    assert silence_after(monitor, clock, 100) == []
    monitor.stop()
    assert silence_after(monitor, clock, 100) == []


def test_a_rank_has_a_status_only_in_training_and_drops_the_state_of_an_earlier_training(monitor):
    monitor.activity.begin_batch(7)
    assert monitor.status()[:2] == (7, activity.DATA)
    monitor.activity.first_gradient = 0.1
    monitor.slow_ranks[1] = "slow"
    monitor.stop()
    assert monitor.status() is None
    monitor.start(30.0, True, InFlight)
    found = monitor.activity
    assert (found.step, found.batches, found.first_gradient, monitor.slow_ranks) == (0, 0, 0.0, {})


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
