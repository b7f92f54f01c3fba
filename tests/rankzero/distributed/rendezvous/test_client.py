"""Processes are threads here; the rendezvous does not distinguish the two."""

import contextlib
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rankzero.distributed import network
from rankzero.distributed.connections.handshake import GREETING
from rankzero.distributed.connections.key import Key
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.rendezvous import client, peers, search
from rankzero.distributed.rendezvous.client import rendezvous
from rankzero.distributed.rendezvous.result import RendezvousResult
from rankzero.messages import RequestError
from running import reserved_port


@pytest.fixture
def port():
    with reserved_port() as port:
        yield port


def launches(port, count=4, nodes=2, **fields):
    per_node = count // nodes
    launch = Launch(
        launcher="env", world_size=count, num_nodes=nodes, port=port, world_id="k", externally_created=True, **fields
    )
    return [
        launch._replace(rank=rank, local_rank=rank % per_node, node_rank=rank // per_node, local_world_size=per_node)
        for rank in range(count)
    ]


def call(all_launches, start_timeout=5.0):
    """Performs the rendezvous of all launches; returns the result or the error of each."""

    def result_of(launch):
        try:
            return rendezvous(launch, start_timeout)
        except RequestError as error:
            return error

    with ThreadPoolExecutor(len(all_launches)) as pool:
        results = list(pool.map(result_of, all_launches))
    for result in results:
        if isinstance(result, RendezvousResult) and result.listener:
            result.listener.close()
    return results


def test_every_process_receives_all_members_by_rank(port):
    results = call(launches(port))
    assert [[member.rank for member in result.members] for result in results] == [[0, 1, 2, 3]] * 4
    assert [result.launch.processes_per_node for result in results] == [(2, 2)] * 4
    assert [bool(result.listener) for result in results] == [True, False, False, False]


def test_positions_that_the_launcher_omits_follow_from_host_names(port, monkeypatch):
    thread = threading.local()
    monkeypatch.setattr(peers.socket, "gethostname", lambda: thread.host)
    incomplete = [
        launch._replace(num_nodes=None, node_rank=None, local_rank=None, local_world_size=None)
        for launch in launches(port, count=5, nodes=1)
    ]

    def run_rendezvous(pair):
        thread.host = pair[1]
        return rendezvous(pair[0], 5)

    with ThreadPoolExecutor(5) as pool:
        results = list(pool.map(run_rendezvous, zip(incomplete, ["b", "a", "b", "a", "b"], strict=True)))
    results[0].listener.close()
    assert [result.launch.local_rank for result in results] == [0, 0, 1, 1, 2]
    assert [result.launch.node_rank for result in results] == [0, 1, 0, 1, 0]
    assert results[0].launch.hosts == ("b", "a") and results[0].launch.processes_per_node == (3, 2)


def test_ranks_are_assigned_host_by_host(port):
    orders = [(0, 3), (1, 0x20000001), (0, 2), (1, 0x20000002)]
    tasks = [
        Launch(
            launcher="pbs", rank=None, local_rank=None, world_size=4, local_world_size=None, num_nodes=2,
            node_rank=node, rank_order=order, port=port, world_id="k", externally_created=True,
        )
        for node, order in orders
    ]  # fmt: skip
    results = call(tasks)
    assert [result.launch.rank for result in results] == [1, 2, 0, 3]
    assert [result.launch.local_rank for result in results] == [1, 0, 0, 1]
    assert sum(bool(result.listener) for result in results) == 1


def test_a_missing_rank_is_named_on_all_ranks(port, scale_timers):
    scale_timers(0.1)
    started = time.monotonic()
    errors = call(launches(port)[:3], start_timeout=1)
    assert time.monotonic() - started < 8
    assert all("missing rank 3; " in error.found for error in errors)
    assert [error.reported_elsewhere for error in errors] == [None, True, True]  # rank zero reports the error


def test_a_missing_machine_is_named(port, scale_timers):
    scale_timers(0.1)
    first, second, *_ = launches(port, hosts=(socket.gethostname(), "gone"))
    assert "missing ranks 2, 3; no process from gone" in call([first, second], start_timeout=1)[0].found
    first, second, *_ = launches(port)
    assert "no process from node 1" in call([first, second], start_timeout=1)[0].found


def test_a_missing_rank_zero_is_reported_once_per_machine(port, scale_timers):
    scale_timers(0.1)
    errors = call(launches(port)[1:3], start_timeout=1)
    assert all("missing rank 0" in error.found for error in errors)
    assert [error.reported_elsewhere for error in errors] == [True, False]  # local rank zero, once per machine


def test_two_processes_with_the_same_rank_are_refused(port, scale_timers):
    scale_timers(0.5)
    first, second, *_ = launches(port)
    errors = call([first, second, second])
    assert all("two: process" in error.found and "with rank 1" in error.asked for error in errors)


def test_two_processes_with_rank_zero_are_refused(port, scale_timers):
    scale_timers(0.5)
    first = launches(port)[0]
    errors = call([first, first])
    assert all("with rank 0" in error.asked for error in errors)


def test_different_world_sizes_are_refused(port, scale_timers):
    scale_timers(0.5)
    first, second, *_ = launches(port)
    errors = call([first, second._replace(world_size=8)])
    assert all("rank 1" in error.found and "expects 8" in error.found for error in errors)


def test_another_run_on_the_port_is_named(port, scale_timers):
    scale_timers(0.1)
    first, *_ = launches(port, count=2, nodes=1)
    unrelated_launch = launches(port, count=2, nodes=1)[1]._replace(world_id="another")
    found = [error.found for error in call([first, unrelated_launch], start_timeout=1)]
    assert "missing rank 1" in found[0] and "another run's rank 0" in found[1]


@pytest.mark.parametrize("reply", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", f"{GREETING} 3\n".encode()])
def test_the_process_on_a_port_in_use_is_named(port, scale_timers, reply):
    scale_timers(0.2)
    with network.listen("127.0.0.1", port) as listener, contextlib.suppress(OSError):
        thread = threading.Thread(target=accept_and_reply, args=(listener, reply), daemon=True)
        thread.start()
        first, second = call(launches(port, count=2, nodes=1), start_timeout=1)
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(5)
    assert "--master_port PORT" in first.instead and "--master_port PORT" in second.instead
    if not reply.startswith(GREETING.encode()):
        assert f"in use by process {os.getpid()} (" in first.found


def accept_and_reply(listener, reply):
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            threading.Timer(2 if not reply else 0.1, connection.close).start()
            connection.sendall(reply)


@pytest.mark.parametrize("name", ["no-such-host.invalid", "a b", "é" * 70, "..", "host\nname"])
def test_an_address_that_does_not_resolve_is_refused(port, name):
    errors = call(launches(port, count=2, address=name), start_timeout=1)
    assert all("does not resolve" in error.found for error in errors)


def test_an_address_of_another_machine_is_refused(port, monkeypatch, scale_timers):
    scale_timers(0.1)
    monkeypatch.setattr(search.network, "resolve", lambda address: ["192.0.2.1"])  # documentation only (RFC 5737)
    monkeypatch.setattr(search.socket, "create_connection", unreachable)
    first, second = call(launches(port, count=2, address="elsewhere"), start_timeout=9)
    assert "elsewhere (192.0.2.1) is another machine or does not exist" in first.found
    assert "elsewhere (192.0.2.1) does not answer" in second.found and second.local_only


def unreachable(address, timeout):
    raise OSError(113, "No route to host")


def test_processes_beyond_the_world_size_are_refused(port, scale_timers):
    scale_timers(0.2)  # nothing answers after the rendezvous
    tasks = [
        Launch(
            launcher="pbs", rank=None, local_rank=None, world_size=2, local_world_size=None, num_nodes=1,
            node_rank=0, rank_order=order, port=port, world_id="k", externally_created=True,
        )
        for order in range(4)
    ]  # fmt: skip
    results = call(tasks, start_timeout=2)
    assert sum(isinstance(result, RendezvousResult) for result in results) == 2
    assert sum(isinstance(result, RequestError) for result in results) == 2


def test_a_process_that_is_refused_alone_reports_it_itself(port, scale_timers):
    """Two machines without a common key have the same rank; rank zero waits for the missing one."""
    scale_timers(0.1)
    first, second, _ = launches(port, count=3, nodes=3)
    duplicate = second._replace(node_rank=2)
    started = [first, second, duplicate]
    keys = {1: Key(b"a" * 32, "first"), 2: Key(b"b" * 32, "second")}
    results = call_with_keys(started, keys)
    refused = [error for error in results[1:] if error.asked == "one process with rank 1"]
    assert [error.local_only for error in refused] == [True] and refused[0].reported_elsewhere is None
    assert "missing rank 2" in results[0].found


def call_with_keys(all_launches, keys):
    """Performs the rendezvous of launches with different keys, by node; returns the result or the error of each."""

    def result_of(launch):
        key = keys.get(launch.node_rank, Key(b"0" * 32, "rank zero"))
        if launch.node_rank:
            time.sleep(0.2 * launch.node_rank)
        try:
            if launch.rank == 0:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(client, "find_key", lambda: key)
                    return rendezvous(launch, 1.5)
            this_peer = peers.Peer.this(launch, key)
            try:
                deadline = time.monotonic() + 1.5
                return search.RankZeroSearch(launch, this_peer, deadline, 1.5, key, False).result()
            except RequestError as error:
                error.local_only = error.reported_elsewhere is None
                raise
        except RequestError as error:
            return error

    with ThreadPoolExecutor(len(all_launches)) as pool:
        return list(pool.map(result_of, all_launches))
