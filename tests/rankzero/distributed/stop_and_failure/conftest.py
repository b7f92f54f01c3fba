"""Provides a real control server and the relay of another node; their ranks are sockets of the test."""

import json
import socket
import time
from contextlib import ExitStack, closing

import pytest

from rankzero.distributed.connections.handshake import perform_handshake
from rankzero.distributed.connections.line_connection import LineConnection
from rankzero.distributed.connections.local_socket import connect_locally, listen_locally
from rankzero.distributed.coordination import network
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.stop_and_failure.relay import NodeRelay
from rankzero.distributed.stop_and_failure.server import ControlServer
from rankzero.distributed.timers import TIMERS
from rankzero.distributed.world import Peer, World
from running import wait_until

SECRET = b"s" * 32


class RankOfTest:
    """A rank's connection to the control server or to the relay of its node."""

    def __init__(self, rank, connection):
        self.rank, self.connection = rank, connection
        self.receive, self.close = connection.receive, connection.close

    @classmethod
    def connected_locally(cls, rank, name):
        found = cls(rank, LineConnection(connect_locally(name)))
        assert perform_handshake(found.connection, "control", "w", None, False, 10)
        found.send({})
        return found

    def send(self, message):
        self.connection.send({"rank": self.rank, **message})

    def next(self, name):
        """Returns the next message with this entry; None if the connection ends or nothing arrives within 10 s."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and (messages := self.receive(1)) is not None:
            if found := [message for message in messages if name in message]:
                return found[0]
        return None


class TwoNodes:
    """Ranks 0 and 1 on rank zero's node, ranks 2 and 3 on a node with a relay."""

    def __init__(self, name):
        listener = network.listen("127.0.0.1", 0)
        peers = {rank: Peer(rank, rank % 2, rank // 2, 4, "aabb"[rank], rank) for rank in range(4)}
        sockets = [listen_locally(f"{name} first"), listener]
        world = World(Launch(world_size=4), peers)
        self.server = ControlServer(sockets, world, False, lambda rank: "", "w", SECRET, 0.05)
        rank_zero = LineConnection(socket.create_connection(listener.getsockname(), timeout=10))
        assert perform_handshake(rank_zero, "control", "w", SECRET, True, 10)
        self.relay_name = f"{name} second"
        self.relay = NodeRelay(listen_locally(self.relay_name), rank_zero, "w", 2)
        names = [f"{name} first"] * 2 + [self.relay_name] * 2
        self.ranks = [RankOfTest.connected_locally(rank, names[rank]) for rank in range(4)]
        wait_until(lambda: len(self.server._ranks) == 4)

    def close(self):
        for rank in self.ranks:
            rank.send({"leaving": True})
            rank.close()
        self.server._thread.join(10)
        self.relay._thread.join(10)
        assert not self.server._thread.is_alive() and not self.relay._thread.is_alive()


class ServerWithRanks:
    """A control server and the connections to it."""

    def __init__(self, size, parent_reports_lost_ranks=False, describe_exit=lambda rank: ""):
        listener = network.listen("127.0.0.1", 0)
        self.address, self.opened, self.size = listener.getsockname(), [], size
        peers = {rank: Peer(rank, rank, 0, size, "ab"[rank % 2], 1) for rank in range(size)}
        settings = parent_reports_lost_ranks, describe_exit, "k", SECRET, TIMERS.heartbeat
        self.server = ControlServer([listener], World(Launch(world_size=size), peers), *settings)

    def connect(self, *lines):
        connection = LineConnection(socket.create_connection(self.address, timeout=10))
        self.opened.append(connection)
        assert perform_handshake(connection, "control", "k", SECRET, True, 10)
        for line in lines:
            connection.send_body(line if isinstance(line, bytes) else json.dumps(line).encode())
        return connection

    def rank(self, rank):
        connection = RankOfTest(rank, self.connect({"rank": rank}))
        wait_until(lambda: rank in self.server._ranks)
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
    with ExitStack() as started:
        yield lambda size, **options: started.enter_context(closing(ServerWithRanks(size, **options)))


@pytest.fixture
def nodes(request, scale_timers):
    scale_timers(0.2)
    with closing(TwoNodes(request.node.name)) as created:
        yield created
