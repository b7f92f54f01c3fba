"""The rendezvous server runs in a thread; the tests connect to it through sockets."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rankzero.distributed import network
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.rendezvous.peers import Peer
from rankzero.distributed.rendezvous.server import RendezvousServer
from rankzero.messages import RequestError


class Client:
    """Connection of a process to rank zero."""

    def __init__(self, port):
        self.connection = socket.create_connection(("127.0.0.1", port), timeout=10)
        self.file = self.connection.makefile("rwb")
        self.greeting = self.file.readline()

    def send(self, line):
        self.file.write(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n")
        self.file.flush()
        return self

    def answer(self):
        return json.loads(self.file.readline() or "null")

    def close(self):
        self.file.close()
        self.connection.close()


class Rendezvous:
    """Rank zero of a world on this machine; a thread waits for the other processes."""

    def __init__(self, pool, size, seconds=10.0, refusal=None):
        self.listener = network.listen("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1]
        self.launch = Launch(
            launcher="env", world_size=size, local_world_size=size, port=self.port, world_id="k", num_nodes=1
        )
        self.this_peer = Peer.this(self.launch)
        self.server = RendezvousServer(self.launch, self.this_peer, self.listener, time.monotonic() + seconds, seconds)
        self.clients = []
        self.members = pool.submit(self.server.wait, refusal)

    def call(self, line=b""):
        client = Client(self.port).send(line)
        self.clients.append(client)
        return client

    def member(self, rank, **fields):
        """Returns the description that the process of this rank sends."""
        return self.this_peer._replace(
            **{"rank": rank, "local_rank": rank, "pid": 1000 + (rank or 0), **fields}
        )._asdict()

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
def rendezvous():
    """Returns a function that starts rank zero of a world of a given size."""
    started = []

    def start(size, **options):
        started.append(Rendezvous(pool, size, **options))
        return started[-1]

    with ThreadPoolExecutor(4) as pool:
        yield start
        for started_rendezvous in started:
            started_rendezvous.close()
