import contextlib
import json
import os
import random
import signal
import socket
import threading
import time
from unittest.mock import Mock

import pytest

from rankzero.distributed.connections import line_server
from rankzero.distributed.connections.handshake import DifferentKeyError, perform_handshake
from rankzero.distributed.connections.line_connection import LineConnection
from rankzero.distributed.connections.line_server import LineServer, raise_file_limit
from rankzero.distributed.coordination import network
from rankzero.distributed.timers import TIMERS
from running import wait_until

KEY = b"k" * 32


class Service:
    """A server in a thread, which identifies each client that sends a message and records all messages."""

    def __init__(self, secret=KEY, requires_key=True, max_unidentified=None):
        self.listener = network.listen("127.0.0.1", 0)
        self.server = LineServer([self.listener], "w", secret, requires_key)
        self.server.max_unidentified = max_unidentified or self.server.max_unidentified
        self.received, self.lost, self.is_over, self.opened = [], 0, False, []
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self):
        while not self.is_over:
            for connection, messages in self.server.poll(0.02):
                if messages is None:
                    self.lost += 1
                else:
                    self.server.identify(connection)
                    self.received += messages

    def connect(self):
        connection = socket.create_connection(self.listener.getsockname(), timeout=10)
        self.opened.append(connection)
        return connection

    def client(self, secret=KEY):
        client = LineConnection(self.connect())
        assert perform_handshake(client, "w", secret, False, 10)
        return client

    def close(self):
        self.is_over = True
        self.thread.join(10)
        self.server.close()
        self.listener.close()
        for connection in self.opened:
            connection.close()


@pytest.fixture
def service():
    """Returns a function that starts a service."""
    with contextlib.ExitStack() as started:
        yield lambda **options: started.enter_context(contextlib.closing(Service(**options)))


def test_messages_of_a_client_with_the_key_and_its_end_are_received_once(service):
    running = service()
    client = running.client()
    for number in range(3):
        client.send({"position": number})
    wait_until(lambda: running.received == [{"position": number} for number in range(3)])
    client.close()
    wait_until(lambda: running.lost == 1)
    assert not list(running.server.connections)


def test_clients_without_the_key_are_served_only_if_it_is_not_required(service):
    running = service()
    with pytest.raises(DifferentKeyError):
        running.client(secret=b"o" * 32)
    wait_until(lambda: not list(running.server.connections))
    assert running.server.wrong_keys == {"127.0.0.1"} and running.received == []
    running = service(requires_key=False)
    running.client(secret=None).send({"position": 1})
    wait_until(lambda: running.received == [{"position": 1}])


def test_no_bytes_of_attackers_disturb_the_service(service, monkeypatch):
    monkeypatch.setattr(line_server, "_ACCEPTED_AT_ONCE", 100)
    running, generator = service(), random.Random(0)
    client = running.client()
    malformed = b"[" * 60_000 + b"\n"
    attacks = [malformed, b"x" * 60_000, json.dumps({"rank": 1}).encode() + b"\n", b"\n" * 5000]
    attacks.append(b"0" * 32 + b" " + b"0" * 64 + b"\n" + malformed)
    for _ in range(200):
        attacks.append(generator.randbytes(generator.choice((1, 10, 100, 5000))) + b"\n" * generator.randrange(3))
    with line_server.FORK_LOCK:  # so that many connections wait until the server accepts one
        attackers = [running.connect() for _ in attacks]
    for attacker, attack in zip(attackers, attacks, strict=True):
        with contextlib.suppress(OSError):  # the server may already have closed the connection
            attacker.sendall(attack)
    client.send({"position": 7})
    wait_until(lambda: running.received == [{"position": 7}])
    assert running.thread.is_alive()


def test_unidentified_connections_are_closed_after_some_seconds(service, monkeypatch):
    monkeypatch.setattr(TIMERS, "identify", 0.2)
    running = service()
    client = running.client()
    client.send({"position": 1})
    wait_until(lambda: running.received)
    for attacker in [running.connect() for _ in range(5)]:
        assert attacker.recv(1000).startswith(b"RANKZERO/3 ")
        assert attacker.recv(1000) == b""
    attacker = running.connect()
    with pytest.raises(OSError):
        for _ in range(200):  # a client that sends its bytes slowly
            attacker.sendall(b"0")
            time.sleep(0.02)
    client.send({"position": 2})
    wait_until(lambda: len(running.received) == 2)


def test_many_idle_connections_do_not_shut_out_a_client(service, monkeypatch):
    monkeypatch.setattr(TIMERS, "make_room", 0.05)
    running = service(max_unidentified=10)
    for _ in range(200):
        running.connect()
    running.client().send({"position": 1})
    wait_until(lambda: running.received == [{"position": 1}])
    assert len(list(running.server.connections)) <= 11


def test_a_client_that_never_reads_does_not_delay_the_others(service):
    running = service()
    slow, fast = running.client(), running.client()
    for client in (slow, fast):
        client.send({"position": 0})
    wait_until(lambda: len(running.received) == 2)
    for connection in running.server.connections:
        for _ in range(100):
            connection.send({"failed": "x" * 10_000})
    received = 0
    while received < 100:
        received += len(fast.receive(10))


def test_a_server_that_accepts_no_more_connections_sleeps_until_a_message_arrives():
    with network.listen("127.0.0.1", 0) as listener:
        server = LineServer([listener], "w", None, requires_key=False)
        server.stop_accepting()
        client, _ = server.connect_own()
        server._selector = Mock(wraps=server._selector)
        client.send({"rank": 0})
        assert [messages for _, messages in server.poll(2.0)] == [[{"rank": 0}]]
        server._selector.select.assert_called_once_with(2.0)
        client.close()


def test_a_process_forked_during_accept_does_not_keep_the_connection_open(service, monkeypatch):
    accepted = threading.Event()
    keep_alive = line_server.keep_alive

    def keep_alive_late(connection):
        accepted.set()
        time.sleep(0.5)  # the main thread forks meanwhile
        keep_alive(connection)

    monkeypatch.setattr(line_server, "keep_alive", keep_alive_late)
    client = service().connect()
    assert accepted.wait(10)
    process = os.fork()
    if process == 0:
        time.sleep(60)
        os._exit(0)
    try:
        client.sendall(b"no hello\n")
        while client.recv(1000):
            pass  # the greeting; then the server closes the connection, and the forked process has no copy
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def test_the_file_limit_is_raised_to_the_most_that_is_allowed(monkeypatch):
    limits = []
    monkeypatch.setattr(line_server.resource, "getrlimit", lambda kind: (1024, 4096))
    monkeypatch.setattr(line_server.resource, "setrlimit", lambda kind, values: limits.append(values))
    raise_file_limit()
    assert limits == [(4096, 4096)]
