import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from torch.distributed import HashStore

from rankzero.distributed.coordination.exchange import StoreExchange
from rankzero.distributed.monitoring import activity
from rankzero.distributed.monitoring import heartbeat as heartbeat_module
from rankzero.distributed.monitoring.activity import BACKWARD, DATA, END, FORWARD, SANITY_CHECK, VALIDATION, Activity
from rankzero.distributed.monitoring.diagnosis import describe_hang
from rankzero.distributed.monitoring.heartbeat import Heartbeat
from rankzero.distributed.monitoring.stacks import WAITING_FUNCTIONS, main_thread_frames, waiting_function
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


def test_only_time_in_training_has_a_status_and_the_limit_grows_by_its_longest_phase(monkeypatch):
    run = Observed(monkeypatch)
    assert run.status_after(5) is None
    run.activity.enter(FORWARD)
    assert run.status_after(8).phase == FORWARD
    run.activity.enter(DATA)
    run.status_after(3)
    assert run.heartbeat.limit == 28
    run.activity.enter(END)
    assert run.status_after(60) is None
    run.activity.enter(DATA)
    run.status_after(1)
    assert run.heartbeat.limit == 28


@pytest.mark.parametrize(("phase", "may_take_longer"), [(VALIDATION, True), (SANITY_CHECK, True), (FORWARD, False)])
def test_the_first_batch_and_each_validation_may_take_longer(monkeypatch, phase, may_take_longer):
    run = Observed(monkeypatch)
    run.activity.enter(activity.HOOK)
    assert run.status_after(1).may_take_longer
    run.activity.begin_batch(0)
    run.activity.enter(phase)
    assert run.status_after(1).may_take_longer
    run.activity.begin_batch(1)
    run.activity.enter(phase)
    assert run.status_after(1).may_take_longer is may_take_longer


def test_details_are_determined_only_for_a_long_phase(monkeypatch):
    calls = []
    run = Observed(monkeypatch, collective=lambda: calls.append(1) or (7, "all_reduce of 3 values"))
    run.activity.enter(BACKWARD)
    assert run.status_after(3).waits_in == "" and not calls
    status = run.status_after(2)
    assert (status.sequence, status.waits_in) == (7, "all_reduce of 3 values")


def test_without_a_record_of_collectives_a_backward_pass_counts_as_waiting(monkeypatch):
    run = Observed(monkeypatch, collective=Mock(side_effect=NotImplementedError))
    run.activity.enter(BACKWARD)
    assert run.status_after(5).waits_in == "a collective"
    run.activity.enter(FORWARD)
    assert run.status_after(5).waits_in == ""


def test_neither_a_debugger_nor_time_during_which_the_process_was_stopped_counts(monkeypatch):
    run = Observed(monkeypatch)
    run.activity.enter(FORWARD)
    run.status_after(2)
    run.seconds += 3600
    assert run.heartbeat.status().age == 0
    assert run.status_after(3).age == 3
    monkeypatch.setattr(heartbeat_module, "is_in_debugger", lambda frames: True)
    assert run.status_after(5).limit is None


@pytest.mark.parametrize(("phase", "compiles"), [(FORWARD, True), (activity.CHECKPOINT, False)])
def test_a_compilation_or_a_checkpoint_is_a_hang_after_five_times_the_limit(monkeypatch, phase, compiles):
    run = Observed(monkeypatch)
    monkeypatch.setattr(heartbeat_module, "is_compiling", lambda frames: compiles)
    run.activity.enter(phase)
    waiting = Status(0, BACKWARD, 99.0, 20.0, waits_in="all_reduce of 3 values")
    assert describe_hang({0: run.status_after(99), 1: waiting}, {}, ["n1", "n1"]) == ""
    assert f"rank 0 on n1 has been in {phase}" in describe_hang({0: run.status_after(2), 1: waiting}, {}, ["n1", "n1"])


def test_the_position_is_the_innermost_line_of_user_code():
    def observe(positions):
        activity = Activity()
        activity.enter(FORWARD)
        beat = Heartbeat(activity, 0.02, lambda: None)
        time.sleep(0.1)
        positions.append(beat.status().position)

    positions = []
    thread = threading.Thread(target=observe, args=(positions,))
    thread.start()
    thread.join(10)
    assert positions[0].startswith("test_heartbeat.py:")


def test_a_rank_in_an_exchange_waits_for_other_ranks():
    assert all(Path(file).exists() for file in WAITING_FUNCTIONS)
    ranks, found = [StoreExchange(store, rank, 2, str) for store in [HashStore()] for rank in range(2)], []

    def decide_on_rank_zero():
        found.append(waiting_function(main_thread_frames()))
        ranks[0].decide(0, list, 10)

    threading.Timer(0.1, decide_on_rank_zero).start()
    assert ranks[1].decide(1, list, 10) == [0, 1]
    assert found == ["an exchange between all ranks"]
