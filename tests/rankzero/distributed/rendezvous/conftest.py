"""The rendezvous server runs in a thread; the tests connect to it through sockets."""

import itertools
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from unittest.mock import Mock

import pytest

from rankzero.distributed.connections.handshake import perform_handshake
from rankzero.distributed.connections.key import Key
from rankzero.distributed.connections.line_connection import LineConnection
from rankzero.distributed.coordination import network
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.rendezvous import client
from rankzero.distributed.rendezvous.server import RendezvousServer
from rankzero.distributed.timers import TIMERS
from rankzero.distributed.world import Peer
from rankzero.messages import RequestError
from running import refusal_of, reserved_port, wait_until

KEY = Key(b"k" * 32, "the tests")


class Client:
    """Connection of a process to rank zero, after the handshake."""

    def __init__(self, port, secret=KEY.secret):
        self.connection = LineConnection(socket.create_connection(("127.0.0.1", port), timeout=10))
        perform_handshake(self.connection, "k", secret, False, 10)

    def send(self, message):
        (self.connection.send_body if isinstance(message, bytes) else self.connection.send)(message)
        return self

    def answer(self):
        return next(iter(self.connection.receive(10) or []), None)

    def close(self):
        self.connection.close()


class Rendezvous:
    """Rank zero of a world on this machine; a thread waits for the other processes."""

    def __init__(self, pool, size, seconds=10.0, refusal=None, key=KEY, **options):
        self.listener = network.listen("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1]
        place = {"launcher": "env", "port": self.port, "world_id": "k"}
        self.launch = Launch(world_size=size, local_world_size=size, num_nodes=1, **place)
        self.this_peer = Peer.this(self.launch, key)
        deadline = time.monotonic() + seconds
        self.server = RendezvousServer(self.launch, self.this_peer, [self.listener], deadline, seconds, key, **options)
        self.clients, self.ids = [], itertools.count()
        self.members = pool.submit(self.server.wait, refusal)

    def call(self, message=None, secret=KEY.secret):
        self.clients.append(Client(self.port, secret))
        return self.clients[-1] if message is None else self.clients[-1].send(message)

    def member(self, rank, **fields):
        """Returns the message by which the process of this rank describes itself."""
        defaults = {"rank": rank, "local_rank": rank, "pid": 1000 + (rank or 0), "id": f"process {next(self.ids)}"}
        return {"peer": self.this_peer._replace(**{**defaults, **fields})._asdict()}

    def wait_for_members(self, count):
        wait_until(lambda: len(self.server.members) == count)

    def refused(self):
        return refusal_of(self.members.result, 10)

    def close(self):
        self.server.deadline = 0
        link = self.server.link if self.members.exception(10) is None else self.listener
        for connection in (*self.clients, link, self.listener):
            connection.close()


@pytest.fixture
def call():
    """Returns a function that connects to a port of this machine, as a process that looks for rank zero does."""
    with ExitStack() as opened:
        yield lambda port: opened.enter_context(closing(Client(port)))


@pytest.fixture
def rendezvous(monkeypatch):
    """Returns a function that starts rank zero of a world of a given size, which waits briefly for refused ranks."""
    monkeypatch.setattr(TIMERS, "refuse", 0.1)
    with ThreadPoolExecutor(4) as pool, ExitStack() as started:
        yield lambda size, **options: started.enter_context(closing(Rendezvous(pool, size, **options)))


@pytest.fixture
def launches():
    """Returns a function that returns the launches of all ranks of a world, on equally large nodes."""

    def create(count=4, nodes=2, **fields):
        size = count // nodes
        place = {"launcher": "env", "port": port, "world_id": "k", "externally_created": True, **fields}
        launch = Launch(world_size=count, num_nodes=nodes, local_world_size=size, **place)
        positions = [{"rank": rank, "local_rank": rank % size, "node_rank": rank // size} for rank in range(count)]
        return [launch._replace(**position) for position in positions]

    with reserved_port() as port:
        yield create


@pytest.fixture
def join():
    """Returns a function that performs the rendezvous of one process, and returns the result or the refusal."""
    joined = []

    def perform(launch, seconds=8):
        try:
            joined.append(client.rendezvous(launch, seconds))
        except RequestError as error:
            return error
        return joined[-1]

    yield perform
    for result in joined:
        result.link.close()


@pytest.fixture
def no_route(monkeypatch):
    """Makes all addresses unreachable."""
    monkeypatch.setattr(socket, "create_connection", Mock(side_effect=OSError(113, "No route to host")))
