import threading
import time

import pytest

from rankzero.distributed.monitoring import heartbeat as heartbeat_module
from rankzero.distributed.monitoring.activity import (
    BACKWARD,
    CHECKPOINT,
    DATA,
    END,
    FORWARD,
    HOOK,
    SANITY_CHECK,
    VALIDATION,
    Activity,
)
from rankzero.distributed.monitoring.diagnosis import describe_hang
from rankzero.distributed.monitoring.heartbeat import Heartbeat
from rankzero.distributed.monitoring.status import Status


class Observed:
    """An activity and its heartbeat, on a clock that the test advances."""

    def __init__(self, monkeypatch, timeout=20.0, collective=lambda: None):
        self.seconds = 100.0
        monkeypatch.setattr("rankzero.distributed.monitoring.activity.monotonic", lambda: self.seconds)
        self.activity = Activity()
        self.heartbeat = Heartbeat(self.activity, timeout, collective, lambda: self.seconds)

    def status_after(self, seconds):
        """Returns the status after this time, with a heartbeat in each second."""
        for _ in range(int(seconds)):
            self.seconds += 1
            status = self.heartbeat.status()
        return status


@pytest.fixture
def observed(monkeypatch):
    return lambda **settings: Observed(monkeypatch, **settings)


def test_no_status_is_reported_outside_training(observed):
    run = observed()
    assert run.status_after(5) is None
    run.activity.enter(DATA)
    assert run.status_after(1).phase == DATA
    run.activity.enter(END)
    assert run.status_after(5) is None


def test_the_limit_grows_by_the_longest_phase_so_far(observed):
    run = observed()
    run.activity.enter(FORWARD)
    run.status_after(8)
    run.activity.enter(DATA)
    run.status_after(3)
    assert run.heartbeat.limit == 28
    run.activity.enter(END)
    run.status_after(60)
    run.activity.enter(DATA)
    run.status_after(1)
    assert run.heartbeat.limit == 28  # time outside training does not count


@pytest.mark.parametrize(("phase", "may_take_longer"), [(VALIDATION, True), (SANITY_CHECK, True), (FORWARD, False)])
def test_the_first_batch_and_each_validation_may_take_longer(observed, phase, may_take_longer):
    run = observed()
    run.activity.enter(HOOK)
    assert run.status_after(1).may_take_longer
    run.activity.begin_batch(0)
    run.activity.enter(phase)
    assert run.status_after(1).may_take_longer
    run.activity.begin_batch(1)
    run.activity.enter(phase)
    assert run.status_after(1).may_take_longer is may_take_longer


def test_details_are_determined_only_for_a_long_phase(observed):
    calls = []
    run = observed(collective=lambda: calls.append(1) or (7, "all_reduce of 3 values"))
    run.activity.enter(BACKWARD)
    assert run.status_after(3).waits_in == "" and not calls
    status = run.status_after(2)
    assert (status.sequence, status.waits_in) == (7, "all_reduce of 3 values")


def test_without_a_record_of_collectives_a_backward_pass_counts_as_waiting(observed):
    def fail():
        raise NotImplementedError

    run = observed(collective=fail)
    run.activity.enter(BACKWARD)
    assert run.status_after(5).waits_in == "a collective"
    run.activity.enter(FORWARD)
    assert run.status_after(5).waits_in == ""


def test_a_debugger_has_no_limit(observed, monkeypatch):
    run = observed()
    monkeypatch.setattr(heartbeat_module, "is_in_debugger", lambda frames: True)
    run.activity.enter(FORWARD)
    assert run.status_after(5).limit is None


@pytest.mark.parametrize(("phase", "compiles"), [(FORWARD, True), (CHECKPOINT, False)])
def test_a_compilation_or_a_checkpoint_is_a_hang_after_five_times_the_limit(observed, monkeypatch, phase, compiles):
    run = observed()
    monkeypatch.setattr(heartbeat_module, "is_compiling", lambda frames: compiles)
    run.activity.enter(phase)
    waiting = Status(0, BACKWARD, 99.0, 20.0, waits_in="all_reduce of 3 values")
    assert describe_hang({0: run.status_after(99), 1: waiting}, {}, ["n1", "n1"]) == ""
    assert f"rank 0 on n1 has been in {phase}" in describe_hang({0: run.status_after(2), 1: waiting}, {}, ["n1", "n1"])


def test_time_during_which_the_process_was_stopped_does_not_count(observed):
    run = observed()
    run.activity.enter(FORWARD)
    run.status_after(2)
    run.seconds += 3600
    assert run.heartbeat.status().age == 0
    assert run.status_after(3).age == 3


def test_the_position_is_the_innermost_line_of_user_code():
    released = threading.Event()
    positions = []

    def observe():
        activity = Activity()
        activity.enter(FORWARD)
        beat = Heartbeat(activity, 0.02, lambda: None)
        time.sleep(0.1)
        positions.append(beat.status().position)
        released.set()

    threading.Thread(target=observe).start()
    released.wait(10)
    assert positions[0].startswith("test_heartbeat.py:")
