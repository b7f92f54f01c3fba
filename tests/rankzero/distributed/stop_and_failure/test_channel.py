"""Ranks are separate processes here, because a failed rank makes the other ranks terminate."""

import contextlib
import itertools
import multiprocessing
import os
import signal
import socket
import time
from itertools import product

import pytest

from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.rendezvous.peers import Members, Peer
from rankzero.distributed.stop_and_failure.channel import ControlChannel
from rankzero.distributed.timers import TIMERS
from running import wait_until


def run_rank(rank, world, pipes, work, result):
    """Runs one rank, which exchanges values through pipes instead of a coordinator's store."""

    def all_gather_object(value):
        for other_rank in range(world):
            pipes[rank, other_rank].put(value)
        return [pipes[other_rank, rank].get() for other_rank in range(world)]

    launch = Launch(rank=rank, world_size=world, local_world_size=world, launcher="env")
    this_peer = Peer.this(launch)._replace(rank=rank)
    members = Members(Peer(**member) for member in all_gather_object(this_peer._asdict()))
    control_channel = ControlChannel(launch, members, lambda value: all_gather_object(value)[0], secret=b"s" * 32)
    all_gather_object(None)
    result.put((rank, work(control_channel, rank, all_gather_object)))
    result.close()
    result.join_thread()
    control_channel.close()


@pytest.fixture(autouse=True)
def short_timers(scale_timers):
    scale_timers(0.25)


def run(world, work):
    """Runs `work` on all ranks; returns the results and the exit codes, each by rank."""
    context = multiprocessing.get_context("fork")
    pipes = {pair: context.SimpleQueue() for pair in product(range(world), repeat=2)}
    result = context.Queue()
    ranks = [context.Process(target=run_rank, args=(rank, world, pipes, work, result)) for rank in range(world)]
    for process in ranks:
        process.start()
    with contextlib.suppress(AssertionError):  # join() would also wait for processes that a rank has forked
        wait_until(lambda: all(process.exitcode is not None for process in ranks), "the end of all ranks")
    results = {}
    while not result.empty():
        results.update([result.get()])
    return [results.get(rank) for rank in range(world)], [process.exitcode for process in ranks]


@pytest.mark.parametrize("requesting", [(0,), (1,), (2,), (0, 1, 2), (1, 2)])
def test_all_ranks_stop_at_the_same_safe_point(requesting):
    """The ranks run in step, as in training, but receive the request at different times."""

    def work(control_channel, rank, all_gather_object):
        for step in range(10_000):
            if step == 20 and rank in requesting:
                control_channel.request_stop(f"rank {rank}")
            all_gather_object(step)  # like a collective: no rank is more than one step ahead
            if reason := control_channel.check_stop():
                return step, reason
        return None

    results, codes = run(3, work)
    assert codes == [0, 0, 0] and len(set(results)) == 1
    step, reason = results[0]
    assert step >= 20 and reason in {f"rank {rank}" for rank in requesting}


def test_ranks_agree_on_a_stop_before_one_of_them_reaches_a_safe_point():
    def work(control_channel, rank, all_gather_object):
        if rank == 0:
            control_channel.request_stop("now")
        time.sleep(1.5 * rank)
        for step in range(100_000):
            time.sleep(0.01)
            if reason := control_channel.check_stop():
                return step, reason
        return None

    (first, second), codes = run(2, work)
    assert codes == [0, 0] and first == second
    assert first[0] < 100 and first[1] == "now"  # 100 steps take 1 s; rank 1 sleeps longer


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_is_reported_once_and_the_other_ranks_are_terminated(failing, capfd):
    def work(control_channel, rank, all_gather_object):
        if rank == failing:
            reports = control_channel.report_failure(f"cause of rank {rank}")
            print("is the reporter" if reports else "is silent", flush=True)
            return "failed"
        control_channel.on_abort = lambda cause: print(f"log of {rank}: {cause}", flush=True)
        time.sleep(30)
        return "never"

    results, codes = run(3, work)
    assert results[failing] == "failed" and codes == [0 if rank == failing else 1 for rank in range(3)]
    out, err = capfd.readouterr()
    assert out.count("is the reporter") == 1 and "is silent" not in out and "stopping all ranks" not in err
    for rank in {0, 1, 2} - {failing}:
        assert f"log of {rank}: cause of rank {failing}; the main thread was at" in out
    assert "time.sleep(30)" in out


@pytest.mark.parametrize("factor", [0.25, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_rank_is_detected_although_its_children_survive(lost, capfd, tmp_path, scale_timers, factor):
    scale_timers(factor)

    def work(control_channel, rank, all_gather_object):
        if rank == lost:
            if os.fork() == 0:  # like a loader process
                while tmp_path.exists():
                    time.sleep(0.1)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(30)

    _, codes = run(3, work)
    assert codes == [-signal.SIGKILL if rank == lost else 1 for rank in range(3)]
    tmp_path.rmdir()
    assert capfd.readouterr().err.count(f"rank {lost} on {socket.gethostname()} was lost") == 1


@pytest.mark.parametrize("factor", [0.25, pytest.param(1, marks=pytest.mark.soak)])
def test_a_suspended_rank_is_killed_before_it_counts_as_blocked(capfd, scale_timers, factor):
    scale_timers(factor)

    def work(control_channel, rank, all_gather_object):
        activity = control_channel.monitor.activity
        control_channel.monitor.start(TIMERS.heartbeat, True, lambda: None)
        activity.begin_batch(0)
        for step in itertools.count(1):
            activity.begin_batch(step)
            if rank == 1 and step == 10:
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(TIMERS.poll)

    _, codes = run(3, work)
    printed = capfd.readouterr().err
    assert codes == [1, -signal.SIGKILL, 1] and "was suspended (SIGSTOP)" in printed
    assert "has not reported for" not in printed


def test_a_single_process_needs_no_agreement_to_stop(capsys):
    control_channel = ControlChannel(Launch(), Members([Peer.this(Launch())]), lambda value: value)
    assert control_channel.check_stop() is None
    control_channel.request_stop("SIGINT")
    control_channel.request_stop("SIGTERM")
    assert control_channel.check_stop() == "SIGINT"
    assert capsys.readouterr().err.count("send it again to stop immediately") == 1
    assert control_channel.report_failure("alone") and control_channel.failure_cause() is None
