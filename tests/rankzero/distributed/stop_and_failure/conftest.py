"""Provides a control server whose ranks are sockets of the test."""

import json
import socket
import time

import pytest

from rankzero.distributed import network
from rankzero.distributed.connections.handshake import perform_handshake
from rankzero.distributed.connections.line_connection import LineConnection
from rankzero.distributed.rendezvous.peers import Members, Peer
from rankzero.distributed.stop_and_failure.server import ControlServer
from rankzero.distributed.timers import TIMERS

SECRET = b"s" * 32


class RankOfTest:
    """A rank's connection to the control server."""

    def __init__(self, rank, connection):
        self.rank, self.connection = rank, connection
        self.receive, self.close = connection.receive, connection.close

    def send(self, message):
        self.connection.send({"rank": self.rank, **message})


class World:
    """A control server and the connections to it."""

    def __init__(self, size, parent_reports_lost_ranks=False, describe_exit=lambda rank: ""):
        listener = network.listen("127.0.0.1", 0)
        self.address, self.opened, self.size = listener.getsockname(), [], size
        members = Members(Peer(rank, rank, 0, size, "ab"[rank % 2], 1) for rank in range(size))
        settings = parent_reports_lost_ranks, describe_exit, "k", SECRET, TIMERS.heartbeat
        self.server = ControlServer([listener], members, *settings)

    def connect(self, *lines):
        connection = LineConnection(socket.create_connection(self.address, timeout=10))
        self.opened.append(connection)
        assert perform_handshake(connection, "control", "k", SECRET, True, 10)
        for line in lines:
            connection.send_body(line if isinstance(line, bytes) else json.dumps(line).encode())
        return connection

    def rank(self, rank):
        connection = RankOfTest(rank, self.connect({"rank": rank}))
        while rank not in self.server._ranks:
            time.sleep(0.001)
        return connection

    def all_ranks(self):
        return [self.rank(rank) for rank in range(self.size)]

    def close(self):
        """Makes the server exit: absent ranks connect and leave, and all connections close."""
        for rank in set(range(self.size)) - self.server._ranks.keys():
            self.connect({"rank": rank}).send({"rank": rank, "leaving": True})
        for connection in self.opened:
            connection.close()
        self.server._thread.join(10)
        assert not self.server._thread.is_alive() and self.server.listeners[0].fileno() == -1


@pytest.fixture
def world():
    """Returns a function that starts a control server for a given number of ranks."""
    started = []

    def start(size, **options):
        started.append(World(size, **options))
        return started[-1]

    yield start
    for started_world in started:
        started_world.close()
