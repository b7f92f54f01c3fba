"""Provides a real control server and the leader of another node; their ranks are sockets of the test."""

import time
from contextlib import ExitStack, closing

import pytest

from rankzero.distributed.connections.line_server import LineServer
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.stop_and_failure.exchange import Exchange
from rankzero.distributed.stop_and_failure.leader import NodeLeader
from rankzero.distributed.stop_and_failure.server import ControlServer
from rankzero.distributed.world import Peer, World


class RankOfTest:
    """A rank's connection to the control server or to the leader of its node."""

    def __init__(self, rank, connection):
        self.rank, self.connection = rank, connection
        self.receive, self.close = connection.receive, connection.close

    def send(self, message):
        self.connection.send({"rank": self.rank, **message})

    def next(self, name):
        """Returns the next message with this entry; None if the connection ends or nothing arrives within 10 s."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and (messages := self.receive(1)) is not None:
            if found := [message for message in messages if name in message]:
                return found[0]
        return None


def connected(server, *ranks):
    """Returns the connection of a new client, and that of the server with the ranks of the client."""
    client, served = server.connect_own()
    return client, {served: [*ranks]}


def control_server(server, ranks, peers, launcher="env", describe_exit=lambda rank: ""):
    """Returns the control server of rank zero, which receives values for an exchange."""
    world = World(Launch(launcher, world_size=len(peers)), peers)
    exchange = Exchange(world, lambda message: None, lambda message: None, lambda: None)
    return ControlServer(server, ranks, world, exchange, describe_exit)


class TwoNodes:
    """Ranks 0 and 1 on rank zero's node, ranks 2 and 3 on a node with a leader."""

    def __init__(self):
        peers = {rank: Peer(rank, rank % 2, rank // 2, 4, "aabb"[rank], rank, id=f"id {rank}") for rank in range(4)}
        first, self.leader = LineServer([], "w", None, requires_key=False), NodeLeader([], "w")
        (zero, ranks_0), (one, ranks_1), (rank_zero, ranks_23) = (
            connected(first, *ranks) for ranks in ([0], [1], [2, 3])
        )
        self.server = control_server(first, ranks_0 | ranks_1 | ranks_23, peers)
        self.server.interval = 0.05
        two, three = self.leader.connect_own(2), self.leader.connect_own(3)
        self.leader.rank_zero = rank_zero
        self.leader.start()
        self.ranks = [RankOfTest(rank, connection) for rank, connection in enumerate((zero, one, two, three))]

    def close(self):
        for rank in self.ranks:
            rank.send({"leaving": True})
            rank.close()
        self.server.thread.join(10)
        self.leader.thread.join(10)
        assert not self.server.thread.is_alive() and not self.leader.thread.is_alive()


class ServerWithRanks:
    """A control server and the connections to it."""

    def __init__(self, size, **options):
        peers = {rank: Peer(rank, rank, 0, size, "ab"[rank % 2], 1) for rank in range(size)}
        server = LineServer([], "k", None, requires_key=False)
        clients = [connected(server, rank) for rank in range(size)]
        self.ranks = [RankOfTest(rank, client) for rank, (client, _) in enumerate(clients)]
        served = {connection: ranks for _, own in clients for connection, ranks in own.items()}
        self.server = control_server(server, served, peers, **options)

    def close(self):
        """Makes the server exit, as all connections are closed."""
        for rank in self.ranks:
            rank.close()
        self.server.thread.join(10)
        assert not self.server.thread.is_alive()


@pytest.fixture
def world():
    """Returns a function that starts a control server, and returns it with its ranks."""
    with ExitStack() as started:
        yield lambda size, **options: started.enter_context(closing(ServerWithRanks(size, **options)))


@pytest.fixture
def nodes(scale_timers):
    scale_timers(0.2)
    with closing(TwoNodes()) as created:
        yield created
