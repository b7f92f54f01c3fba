"""Simulated nodes: one process holds the connections of all nodes other than rank zero itself."""

import selectors
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NamedTuple

from rankzero.distributed.connections.handshake import Challenge, hello, is_servers_proof, parse_greeting, session_keys
from rankzero.distributed.connections.key import Key
from rankzero.distributed.connections.line_connection import LineConnection, Message
from rankzero.distributed.connections.line_server import raise_file_limit
from rankzero.distributed.monitoring.hangs import Status
from rankzero.distributed.world import Peer

KEY = Key(b"k" * 32, "the benchmark", is_explicit=True)
WORLD_ID = "benchmark"
TIMEOUT = 600.0
STATUS = list(Status(812, "backward", 0.3, 300.0, False, "", 0, "", 0.1))
CONNECTED_AT_ONCE = 64
"""Nodes that connect before the others are served again."""


class Shape(NamedTuple):
    """The shape of a run.

    Args:
        nodes: Number of nodes.
        ranks: Number of ranks on each node.
    """

    nodes: int
    ranks: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks

    def peers(self) -> list[Peer]:
        """Returns all processes as they describe themselves."""
        host = "host-with-a-name-{:05}.cluster"
        return [
            Peer(
                rank=rank,
                local_rank=rank % self.ranks,
                node_rank=rank // self.ranks,
                world_size=self.size,
                host=host.format(rank // self.ranks),
                pid=100_000 + rank,
                boot=f"boot-{rank // self.ranks:031}",
                pids="pid:[4026531836]",
                cores="0-127",
                id=f"{rank:016x}",
            )
            for rank in range(self.size)
        ]


class CountingSocket(socket.socket):
    """A socket that counts the bytes that it receives."""

    received = 0

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Receives and counts."""
        data = super().recv(size, flags)
        self.received += len(data)
        return data


class SimulatedNode:
    """The connection of the leader of one node."""

    def __init__(self, node: int, world: Shape, port: int) -> None:
        self.node = node
        self.ranks = range(max(node * world.ranks, 1), (node + 1) * world.ranks)
        self.socket = CountingSocket(socket.AF_INET, socket.SOCK_STREAM)
        self.socket.connect(("127.0.0.1", port))
        self.socket.setblocking(False)
        self.connection = LineConnection(self.socket, 64 << 20)
        self._challenge: Challenge | None = None
        self._nonce = ""

    def receive(self) -> list[Message] | None:
        """Returns the received messages; None as long as the handshake is not complete.

        Raises:
            ConnectionError: The server has closed the connection.
        """
        assert KEY.secret
        if self.connection.is_authenticated:
            messages = self.connection.receive(0)
            if messages is None:
                raise ConnectionError(self.connection.close_reason)
            return messages
        if not self.connection.read_available():
            raise ConnectionError(self.connection.close_reason)
        if (line := self.connection.pop_line()) is None:
            return None
        if self._challenge is None:
            self._challenge = parse_greeting(line, WORLD_ID)
            assert self._challenge
            self._nonce, answer = hello(self._challenge, KEY.secret)
            self.connection.send_line(answer)
            return None
        assert is_servers_proof(line, self._challenge, self._nonce, KEY.secret)
        keys = session_keys(KEY.secret, self._challenge, self._nonce)
        self.connection.sign_messages(keys.client, keys.server)
        return []


class SimulatedNodes:
    """The connections of all nodes, including one for the other ranks of rank zero's node."""

    def __init__(self, world: Shape, port: int) -> None:
        raise_file_limit()
        self.world, self.selector = world, selectors.DefaultSelector()
        self.nodes: list[SimulatedNode] = []
        self._numbers = [node for node in range(world.nodes) if node or world.ranks > 1]
        self._port = port

    def _connect(self, count: int) -> None:
        """Connects some more nodes."""
        for number in self._numbers[len(self.nodes) : len(self.nodes) + count]:
            node = SimulatedNode(number, self.world, self._port)
            self.nodes.append(node)
            self.selector.register(node.socket, selectors.EVENT_READ, node)

    @property
    def received(self) -> int:
        """Bytes that all nodes have received."""
        return sum(node.socket.received for node in self.nodes)

    def serve(self, seconds: float, handle: Callable[[SimulatedNode, list[Message]], None]) -> None:
        """Passes received messages to `handle`, once within `seconds`; an empty list ends the handshake of a node."""
        for key, _ in self.selector.select(seconds):
            messages = key.data.receive()
            if messages is not None:
                handle(key.data, messages)

    def drop_last(self) -> None:
        """Ends the connection of the last node."""
        node = self.nodes.pop()
        self._numbers.pop()
        self.selector.unregister(node.socket)
        node.socket.close()

    def serve_until_all(self, handle: Callable[[SimulatedNode, list[Message]], bool]) -> None:
        """Serves until `handle` has returned true for each node."""
        done: set[int] = set()

        def count(node: SimulatedNode, messages: list[Message]) -> None:
            if handle(node, messages):
                done.add(node.node)

        while len(done) < len(self._numbers):
            self._connect(CONNECTED_AT_ONCE)
            self.serve(1.0, count)


def simulate(world: Shape, port: int, pipe: Connection) -> None:
    """Simulates a run of all nodes: rendezvous, an exchange, states for some seconds, a stop, the loss of a node.

    Reports the received bytes of the rendezvous, the end of the exchange, bytes and number of the reports, and the
    seconds until all nodes have received the stop and the failure.
    """
    peers, nodes = world.peers(), SimulatedNodes(world, port)

    def describe(node: SimulatedNode, messages: list[Message]) -> bool:
        if not messages:
            for rank in node.ranks:
                node.connection.send({"peer": peers[rank]._asdict()})
        return any("views" in message for message in messages)

    nodes.serve_until_all(describe)
    pipe.send(nodes.received)

    pipe.recv()
    for node in nodes.nodes:
        for rank in node.ranks:
            node.connection.send({"rank": rank, "value": [1, None]})
    nodes.serve_until_all(lambda node, messages: any("decided" in message for message in messages))
    pipe.send("decided")

    seconds, received = pipe.recv(), nodes.received
    reports = report_states(nodes, seconds)
    pipe.send((nodes.received - received, reports))

    started = time.monotonic()
    first = nodes.nodes[0]
    first.connection.send({"rank": first.ranks[0], "stop": "SIGTERM"})

    def stop(node: SimulatedNode, messages: list[Message]) -> bool:
        if any("stop_requested" in message for message in messages):
            for rank in node.ranks:
                node.connection.send({"rank": rank, "position": 100})
        return any("stop_at" in message for message in messages)

    nodes.serve_until_all(stop)
    pipe.send(time.monotonic() - started)

    started = time.monotonic()
    nodes.drop_last()
    nodes.serve_until_all(lambda node, messages: any("failed" in message for message in messages))
    pipe.send(time.monotonic() - started)
    pipe.recv()


def report_states(nodes: SimulatedNodes, seconds: float) -> int:
    """Answers rank zero's requests for the states of all ranks; returns the number of answers."""
    count = 0

    def report(node: SimulatedNode, messages: list[Message]) -> None:
        nonlocal count
        if any("rank_zero" in message for message in messages):
            count += 1
            node.connection.send({"statuses": [[rank, STATUS] for rank in node.ranks]})

    deadline = time.monotonic() + seconds
    while (remaining := deadline - time.monotonic()) > 0:
        nodes.serve(remaining, report)
    return count
