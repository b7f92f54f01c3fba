"""Control channels of ranks in threads. In tests/system, ranks are killed, suspended and made to fail in training."""

import threading
import time
from functools import partial
from pathlib import Path

import pytest

from rankzero.distributed.stop_and_failure import channel
from rankzero.distributed.stop_and_failure.channel import ControlChannel
from rankzero.distributed.world import World
from running import on_each_rank, wait_until


def reach_safe_point(control_channel):
    """Returns the reason if all ranks stop at the next safe point, else None."""
    control_channel.position += 1
    stops = control_channel.stop_reason is not None and control_channel.wait_for_stop_position()
    return control_channel.stop_reason if stops else None


def stop_of(member, requests_in=None, step_done=lambda: time.sleep(0.001)):
    """Takes steps until all ranks stop, after a request in one of them; returns the last step and the reason."""
    for step in range(10_000):
        if step == requests_in:
            member.control_channel.request_stop(f"rank {member.world.rank}")
        step_done()
        if reason := reach_safe_point(member.control_channel):
            return step, reason
    return None


@pytest.mark.parametrize("requesting", [(0,), (1,), (2,), (0, 1, 2), (1, 2)])
def test_all_ranks_stop_at_the_same_safe_point(coordinators, requesting):
    """The ranks run in step, as in training, but receive the request at different times."""
    in_step = partial(threading.Barrier(3).wait, 10)  # like a collective: no rank is more than one step ahead

    def train(member):
        return stop_of(member, 20 if member.world.rank in requesting else None, in_step)

    results = on_each_rank(coordinators, train)
    assert len(set(results)) == 1
    step, reason = results[0]
    assert step >= 20 and reason in {f"rank {rank}" for rank in requesting}


def test_ranks_agree_on_a_stop_before_one_of_them_reaches_a_safe_point(coordinators):
    first = stop_of(coordinators[0], requests_in=0)
    assert first[1] == "rank 0" and [stop_of(member) for member in coordinators[1:]] == [first] * 2


@pytest.mark.parametrize("difference", ["error", "position", "absent"])
def test_ranks_know_whether_all_of_them_have_raised_the_same_error(coordinators, difference):
    seconds = 10.0

    def compare(member, error="ValueError"):
        return member.control_channel.is_same_on_all_ranks(error, seconds)

    def compare_differently(member):
        is_other = member.world.rank == 1
        member.control_channel.position += is_other and difference == "position"
        if is_other and difference == "absent":
            return False
        return compare(member, "KeyError" if is_other and difference == "error" else "ValueError")

    assert [on_each_rank(coordinators, compare) for _ in range(3)] == [[True] * 3] * 3
    seconds = 0.5
    assert on_each_rank(coordinators, compare_differently) == [False] * 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_is_reported_once_and_the_other_ranks_exit(coordinators, scale_timers, monkeypatch, capsys, failing):
    scale_timers(0.1)
    exit_codes, causes = [], {}

    def exit_thread(code):
        exit_codes.append(code)
        raise SystemExit

    monkeypatch.setattr(channel, "ORIGINAL_EXIT", exit_thread)
    for member in coordinators:
        member.control_channel.on_abort = partial(causes.__setitem__, member.world.rank)
    failed, others = coordinators[failing].control_channel, {0, 1, 2} - {failing}
    assert failed.report_failure(f"cause of rank {failing}"), "the rank prints the cause"
    failed.close()
    wait_until(lambda: len(exit_codes) == 3)
    assert exit_codes == [1] * 3 and "stopping all ranks" not in capsys.readouterr().err
    for rank in others:
        assert causes[rank].startswith(f"cause of rank {failing}; the main thread was at\n")
        assert Path(__file__).name in causes[rank]


def test_a_rank_waits_for_no_refusals_after_a_failure(coordinators, monkeypatch):
    """The thread that would receive them then waits for the main thread to exit."""
    member = coordinators[1].control_channel
    with monkeypatch.context() as patched:
        patched.setattr(channel.TIMERS, "cause", 1000.0)
        patched.setattr(member, "_send", lambda message: None)
        member._failure_received.set()
        assert member.refusals() == {}


def test_a_single_process_needs_no_agreement_to_stop(capsys):
    control_channel = ControlChannel(World(), None)
    assert reach_safe_point(control_channel) is None
    control_channel.request_stop("SIGINT")
    control_channel.request_stop("SIGTERM")
    assert reach_safe_point(control_channel) == "SIGINT"
    assert capsys.readouterr().err.count("send it again to stop immediately") == 1
    assert control_channel.report_failure("alone") and control_channel.failure_cause() is None
