"""Ranks are sockets of the test, which exchange messages with a real control server."""

import json
import os
import signal
import socket
import threading
import time

import pytest

from rankzero.distributed.stop_and_failure import server
from rankzero.distributed.stop_and_failure.server import LAUNCHER_REPORTS, keep_alive


def all_messages(connection, count):
    """Returns the next messages without heartbeats; fewer if the connection ends or 10 seconds pass."""
    found, deadline = [], time.monotonic() + 10
    while len(found) < count and time.monotonic() < deadline and (received := connection.receive(1)) is not None:
        found += [message for message in received if message and "rank_zero" not in message]
    return found


def test_a_process_forked_during_accept_does_not_keep_the_connection_open(world, monkeypatch):
    accepted = threading.Event()

    def keep_alive_late(connection):
        accepted.set()
        time.sleep(0.5)  # the main thread forks meanwhile
        keep_alive(connection)

    monkeypatch.setattr(server, "keep_alive", keep_alive_late)
    control = world(2)
    client = socket.create_connection(control.server.listener.getsockname())
    assert accepted.wait(10)
    process = os.fork()
    if process == 0:
        time.sleep(60)
        os._exit(0)
    try:
        client.sendall(b"no rank's greeting\n")
        client.settimeout(10)
        assert client.recv(1) == b""  # the server closed the connection, and the forked process has no copy
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        client.close()


def expect_messages(ranks, *messages):
    for connection in ranks:
        assert all_messages(connection, len(messages)) == [*messages]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_ranks_stop_at_the_safe_point_after_the_most_advanced_position(world, size):
    ranks = world(size).all_ranks()
    ranks[-1].send({"stop": "SIGTERM"})
    expect_messages(ranks, {"stop_requested": "SIGTERM"})
    for rank, connection in enumerate(ranks):
        connection.send({"position": 10 + rank})
    expect_messages(ranks, {"stop_at": 10 + size})


def test_before_the_first_step_all_ranks_stop_at_safe_point_0(world):
    ranks = world(2).all_ranks()
    ranks[0].send({"stop": "SIGINT"})
    expect_messages(ranks, {"stop_requested": "SIGINT"})
    for connection in ranks:
        connection.send({"position": -1})
    expect_messages(ranks, {"stop_at": 0})


def test_later_stop_requests_are_ignored(world):
    ranks = world(2).all_ranks()
    ranks[0].send({"stop": "SIGTERM"})
    expect_messages(ranks, {"stop_requested": "SIGTERM"})
    ranks[1].send({"stop": "SIGINT"})
    for connection in ranks:
        connection.send({"position": 4})
    expect_messages(ranks, {"stop_at": 5})


def test_a_stop_does_not_wait_for_a_rank_that_has_left(world):
    ranks = world(3).all_ranks()
    ranks[0].send({"stop": "SIGTERM"})
    expect_messages(ranks, {"stop_requested": "SIGTERM"})
    ranks[0].send({"position": 3})
    ranks[1].send({"position": 2})
    ranks[2].send({"leaving": True})
    expect_messages(ranks[:2], {"stop_at": 4})


def test_a_rank_that_connects_late_receives_the_stop_request(world):
    control = world(2)
    early = control.rank(0)
    early.send({"stop": "SIGTERM"})
    expect_messages([early], {"stop_requested": "SIGTERM"})
    expect_messages([control.rank(1)], {"stop_requested": "SIGTERM"})


def test_the_first_failure_is_sent_to_all_ranks_with_its_reporting_rank(world):
    control = world(3)
    ranks = [control.rank(0), control.rank(1)]
    ranks[1].send({"failed": "out of memory"})
    failure = {"failed": "out of memory", "by": 1}
    expect_messages(ranks, failure)
    ranks[0].send({"failed": "connection closed by peer"})
    expect_messages([control.rank(2)], failure)
    ranks[0].send({"stop": "SIGTERM"})
    expect_messages(ranks, {"stop_requested": "SIGTERM"})  # without a second failure before it


@pytest.mark.parametrize(
    ("parent_reports_lost_ranks", "description", "text", "reporting_rank"),
    [
        (False, "", "was lost (killed? out of memory?)", 0),
        (True, "", "was lost (killed? out of memory?)", LAUNCHER_REPORTS),
        (False, "was killed by SIGKILL", "was killed by SIGKILL", 0),
    ],
)
def test_a_lost_rank_is_a_failure(world, parent_reports_lost_ranks, description, text, reporting_rank):
    control = world(
        3,
        parent_reports_lost_ranks=parent_reports_lost_ranks,
        describe_exit=lambda rank: description and f"{description}" * (rank == 1),
    )
    ranks = control.all_ranks()
    ranks[1].connection.close()
    expect_messages([ranks[0], ranks[2]], {"failed": f"rank 1 on b {text}", "by": reporting_rank})


def test_a_rank_that_has_left_may_disconnect(world):
    ranks = world(2).all_ranks()
    ranks[1].send({"leaving": True})
    ranks[1].connection.close()
    ranks[0].send({"stop": "SIGTERM"})
    expect_messages(ranks[:1], {"stop_requested": "SIGTERM"})


def test_a_rank_that_does_not_connect_is_a_failure(world, monkeypatch):
    monkeypatch.setattr(server, "HEARTBEAT_SECONDS", 0.02)
    control = world(3)
    ranks = [control.rank(0), control.rank(2)]
    assert ranks[0].receive(10) == [{"rank_zero": ""}]  # the heartbeat
    monkeypatch.setattr(server, "MISSING_RANK_SECONDS", 0.0)
    expect_messages(ranks, {"failed": "rank 1 on b did not open its control connection", "by": 0})


@pytest.mark.parametrize(
    "greeting",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"[]\n\xff\n",
        pytest.param(b"[" * 5000 + b"\n", id="nested"),
        b"\n",
        {"rank": 1},
        {"rank": 1, "token": "wrong"},
        {"rank": 1, "token": None},
        {"rank": 2, "token": "right"},
        {"rank": -1, "token": "right"},
        {"rank": "1", "token": "right"},
        {"rank": 1.0, "token": "right"},
        {"token": "right"},
    ],
)
def test_unknown_clients_are_disconnected(world, greeting):
    control = world(2)
    if isinstance(greeting, dict) and greeting.get("token") == "right":
        greeting = {**greeting, "token": control.server.token}
    rank = control.rank(0)
    client = control.connect(greeting)
    while (messages := client.receive(10)) is not None:
        assert messages == [{}]
    rank.send({"stop": "SIGTERM"})
    expect_messages([rank], {"stop_requested": "SIGTERM"})  # without a failure before it


def test_a_greeting_may_arrive_in_two_packets(world):
    control = world(1)
    greeting = json.dumps({"rank": 0, "token": control.server.token}).encode() + b"\n"
    rank = control.connect(greeting[:9])
    time.sleep(0.2)  # the server reads the first packet meanwhile
    rank.connection.sendall(greeting[9:] + b'{"stop": "SIGTERM"}\n')
    expect_messages([rank], {"stop_requested": "SIGTERM"})


def test_every_server_has_its_own_token(world):
    tokens = {world(1).server.token for _ in range(3)}
    assert len(tokens) == 3 and all(len(token) >= 16 for token in tokens)


def test_finish_announces_rank_zeros_exit_and_waits_for_the_other_ranks(world):
    control = world(2)
    ranks = control.all_ranks()
    ranks[0].send({"leaving": True})
    finishing = threading.Thread(target=control.server.finish)
    finishing.start()
    expect_messages(ranks[1:], {"done": True})
    assert finishing.is_alive()
    ranks[1].send({"leaving": True})
    finishing.join(10)
    assert not finishing.is_alive() and control.server.listener.fileno() == -1


def test_finish_waits_a_limited_time_for_the_other_ranks(world, monkeypatch):
    monkeypatch.setattr(server, "FINISH_SECONDS", 0.01)
    control = world(2)
    control.all_ranks()
    control.server.finish()
    assert control.server._thread.is_alive()
