"""The rendezvous server runs in a thread; the tests connect to it through sockets."""

import itertools
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rankzero.distributed import network
from rankzero.distributed.connections.handshake import perform_handshake
from rankzero.distributed.connections.key import Key
from rankzero.distributed.connections.line_connection import LineConnection
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.rendezvous.peers import Peer
from rankzero.distributed.rendezvous.server import RendezvousServer
from rankzero.distributed.timers import TIMERS
from rankzero.messages import RequestError

KEY = Key(b"k" * 32, "the tests")


class Client:
    """Connection of a process to rank zero, after the handshake."""

    def __init__(self, port, secret=KEY.secret):
        self.connection = LineConnection(socket.create_connection(("127.0.0.1", port), timeout=10))
        self.is_open = perform_handshake(self.connection, "rendezvous", "k", secret, False, 10)

    def send(self, message):
        if isinstance(message, bytes):
            self.connection.send_body(message)
        else:
            self.connection.send(message)
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
        self.launch = Launch(
            launcher="env", world_size=size, local_world_size=size, port=self.port, world_id="k", num_nodes=1
        )
        self.this_peer = Peer.this(self.launch, key)
        deadline = time.monotonic() + seconds
        self.server = RendezvousServer(self.launch, self.this_peer, [self.listener], deadline, seconds, key, **options)
        self.clients, self.ids = [], itertools.count()
        self.members = pool.submit(self.server.wait, refusal)

    def call(self, message=None, secret=KEY.secret):
        client = Client(self.port, secret)
        if message is not None:
            client.send(message)
        self.clients.append(client)
        return client

    def member(self, rank, **fields):
        """Returns the message by which the process of this rank describes itself."""
        defaults = {"rank": rank, "local_rank": rank, "pid": 1000 + (rank or 0), "id": f"process {next(self.ids)}"}
        return {"peer": self.this_peer._replace(**{**defaults, **fields})._asdict()}

    def wait_for_members(self, count):
        while len(self.server.members) != count:
            time.sleep(0.01)

    def refused(self):
        with pytest.raises(RequestError) as caught:
            self.members.result(10)
        return caught.value

    def close(self):
        self.server.deadline = 0
        self.members.exception(10)
        for connection in (*self.clients, self.listener):
            connection.close()


@pytest.fixture
def call():
    """Returns a function that connects to a port of this machine, as a process that looks for rank zero does."""
    clients = []

    def connect(port):
        clients.append(Client(port))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


@pytest.fixture
def rendezvous(monkeypatch):
    """Returns a function that starts rank zero of a world of a given size, which waits briefly for refused ranks."""
    monkeypatch.setattr(TIMERS, "refuse", 0.1)
    started = []

    def start(size, **options):
        started.append(Rendezvous(pool, size, **options))
        return started[-1]

    with ThreadPoolExecutor(4) as pool:
        yield start
        for started_rendezvous in started:
            started_rendezvous.close()
