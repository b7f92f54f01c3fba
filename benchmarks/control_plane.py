"""Load on rank zero of connections, agreements and stops, with the real servers and simulated nodes.

python benchmarks/control_plane.py                      # 1,024 ranks as 128 x 8 and 1,024 x 1, and 4,096 x 8
python benchmarks/control_plane.py --worlds 16x4 --seconds 5

Another process simulates all other nodes, so that this process has only the load of rank zero. The time of the
agreement, of the stop and of the failure ends when the last rank has received it.
"""

import argparse
import json
import multiprocessing
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from rankzero.distributed import network
from rankzero.distributed.connections.handshake import Challenge, hello, is_servers_proof, parse_greeting, session_keys
from rankzero.distributed.connections.key import Key
from rankzero.distributed.connections.line_connection import LineConnection, Message
from rankzero.distributed.connections.line_server import raise_file_limit
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.monitoring.heartbeat import heartbeat_seconds
from rankzero.distributed.monitoring.status import Status
from rankzero.distributed.rendezvous.peers import Members, Peer, assign_ranks
from rankzero.distributed.rendezvous.server import RendezvousServer

KEY = Key(b"k" * 32, "the benchmark", is_explicit=True)
WORLD_ID = "benchmark"
TIMEOUT = 600.0
STATUS = list(Status(812, "backward", 0.3, 300.0, False, False, "", 0, "", 0.1))
MAX_STORE_CLIENTS = 8

CONNECTED_AT_ONCE = 64
"""Nodes that connect before the others are served again."""


class World(NamedTuple):
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

    def __init__(self, node: int, world: World, port: int, service: str) -> None:
        self.node, self.service = node, service
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
            self._challenge = parse_greeting(line, self.service, WORLD_ID)
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

    def __init__(self, world: World, port: int, service: str) -> None:
        raise_file_limit()
        self.world, self.selector = world, selectors.DefaultSelector()
        self.nodes: list[SimulatedNode] = []
        self._numbers = [node for node in range(world.nodes) if node or world.ranks > 1]
        self._port, self._service = port, service

    def _connect(self, count: int) -> None:
        """Connects some more nodes."""
        for number in self._numbers[len(self.nodes) : len(self.nodes) + count]:
            node = SimulatedNode(number, self.world, self._port, self._service)
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


def rendezvous_clients(world: World, port: int, pipe: Connection) -> None:
    """Connects all nodes; reports the bytes that they have received."""
    peers, nodes = world.peers(), SimulatedNodes(world, port, "rendezvous")

    def handle(node: SimulatedNode, messages: list[Message]) -> bool:
        if not messages:
            for rank in node.ranks:
                node.connection.send({"peer": peers[rank]._asdict()})
        has_answer = any("views" in message for message in messages)
        if has_answer:
            nodes.selector.unregister(node.socket)  # the server closes the connection
        return has_answer

    nodes.serve_until_all(handle)
    pipe.send(nodes.received)


def store_clients(world: World, port: int, pipe: Connection) -> None:
    """Takes part in one exchange for all ranks except rank zero; reports when the last rank has its answer."""
    from torch._C._distributed_c10d import TCPStore

    count = min(MAX_STORE_CLIENTS, world.size - 1)

    def take_part(ranks: Iterable[int]) -> None:
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=TIMEOUT), wait_for_workers=False)
        ready.wait()
        for rank in ranks:
            store.set(f"exchange 1 {rank}", "null")
        for _ in ranks:
            store.wait(["exchange 1"], timedelta(seconds=TIMEOUT))
            store.get("exchange 1")

    ready = threading.Barrier(count + 1)
    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(take_part, range(1 + part, world.size, count)) for part in range(count)]
        ready.wait()
        pipe.send("started")
        for future in futures:
            future.result()
    pipe.send("finished")


def control_clients(world: World, port: int, pipe: Connection) -> None:
    """Reports states for some seconds, then requests a stop, then ends the connection of the last node."""
    nodes = SimulatedNodes(world, port, "control")

    def introduce(node: SimulatedNode, messages: list[Message]) -> bool:
        if not messages:
            for rank in node.ranks:
                node.connection.send({"rank": rank})
        return True

    nodes.serve_until_all(introduce)
    pipe.send("connected")
    seconds, interval = pipe.recv(), heartbeat_seconds(world.nodes)
    report_states(nodes, seconds, interval)
    pipe.send(nodes.received)

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


def report_states(nodes: SimulatedNodes, seconds: float, interval: float) -> None:
    """Sends the states of the ranks of each node at intervals, evenly distributed over the interval."""
    started, count, sent = time.monotonic(), len(nodes.nodes), 0
    while (elapsed := time.monotonic() - started) < seconds:
        while sent < elapsed / interval * count:
            node = nodes.nodes[sent % count]
            node.connection.send({"statuses": [[rank, STATUS] for rank in node.ranks]})
            sent += 1
        nodes.serve(0.02, lambda node, messages: None)


class Clients:
    """A process that simulates all other nodes."""

    def __init__(self, work: Callable[[World, int, Connection], None], world: World, port: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, child = context.Pipe()
        self._process = context.Process(target=work, args=(world, port, child))
        self._process.start()
        child.close()

    def receive(self) -> Any:
        """Returns the next report."""
        return self.pipe.recv()

    def close(self) -> None:
        """Waits for the end of the process."""
        self.pipe.close()
        self._process.join(10)
        self._process.kill()


def measure_rendezvous(world: World) -> dict[str, float]:
    """Returns CPU time of rank zero and bytes that it sends."""
    listener = network.listen("127.0.0.1", 0)
    first = world.peers()[0]
    launch = Launch(
        launcher="env", rank=0, world_size=world.size, num_nodes=world.nodes, world_id=WORLD_ID,
        local_world_size=world.ranks,
    )  # fmt: skip
    clients = Clients(rendezvous_clients, world, listener.getsockname()[1])
    started, deadline = time.process_time(), time.monotonic() + TIMEOUT
    assigned = RendezvousServer(launch, first, [listener], deadline, TIMEOUT, KEY).wait()
    cpu = time.process_time() - started
    assert len(assigned) == world.size
    sent = clients.receive()
    clients.close()
    listener.close()
    return {"rendezvous CPU (s)": cpu, "rendezvous bytes (MB)": sent / 1e6}


def measure_agreement(world: World) -> dict[str, float]:
    """Returns the time of one exchange through the store, and the CPU time and operations of the store's server."""
    from torch._C._distributed_c10d import TCPStore

    from rankzero.distributed.coordination.exchange import StoreExchange

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    store = TCPStore("127.0.0.1", port, is_master=True, timeout=timedelta(seconds=TIMEOUT), wait_for_workers=False)
    clients = Clients(store_clients, world, port)
    exchange = StoreExchange(store, 0, world.size, "rank {}".format)
    clients.receive()
    started, cpu = time.monotonic(), time.process_time()
    assert exchange.decide(None, len, TIMEOUT) == world.size
    clients.receive()
    seconds, cpu = time.monotonic() - started, time.process_time() - cpu
    clients.close()
    return {"agreement (s)": seconds, "agreement CPU (s)": cpu, "agreement operations": 3 * world.size + 3}


def measure_control(world: World, seconds: float) -> dict[str, float]:
    """Returns the CPU time of rank zero during training in percent, and the seconds of a stop and of a failure."""
    from rankzero.distributed.stop_and_failure.server import ControlServer

    listener = network.listen("127.0.0.1", 0)
    members = Members(assign_ranks(world.peers()))
    server = ControlServer(
        [listener], members, False, world_id=WORLD_ID, secret=KEY.secret, interval=heartbeat_seconds(world.nodes)
    )
    clients = Clients(control_clients, world, listener.getsockname()[1])
    own = LineConnection(socket.create_connection(listener.getsockname()))
    join_as_rank_zero(own)
    clients.receive()
    while server.connected < world.size:
        time.sleep(0.1)
    started, cpu = time.monotonic(), time.process_time()
    clients.pipe.send(seconds)
    sent = clients.receive()
    percent = 100 * (time.process_time() - cpu) / (time.monotonic() - started)
    stop, failure = clients.receive(), clients.receive()
    clients.pipe.send("end")
    clients.close()
    return {"control CPU (%)": percent, "control bytes (MB)": sent / 1e6, "stop (s)": stop, "failure (s)": failure}


def join_as_rank_zero(connection: LineConnection) -> None:
    """Connects rank zero itself, which answers stop requests in a thread."""
    from rankzero.distributed.connections.handshake import perform_handshake

    assert perform_handshake(connection, "control", WORLD_ID, KEY.secret, True, 10)
    connection.send({"rank": 0})

    def answer() -> None:
        while (messages := connection.receive(60)) is not None:
            if any("stop_requested" in message for message in messages):
                connection.send({"rank": 0, "position": 100})

    threading.Thread(target=answer, daemon=True).start()


def main() -> None:
    """Measures each world, and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--worlds", nargs="+", default=["128x8", "1024x1", "4096x8"], help="nodes x ranks per node")
    parser.add_argument("--seconds", type=float, default=30.0, help="simulated training")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    raise_file_limit()
    results = {}
    for text in arguments.worlds:
        world = World(*map(int, text.split("x")))
        print(f"measuring {text} ...", file=sys.stderr, flush=True)
        results[text] = {
            **measure_rendezvous(world),
            **measure_agreement(world),
            **measure_control(world, arguments.seconds),
        }
    if arguments.json:
        print(json.dumps(results))
        return
    print(f"| rank zero | {' | '.join(results)} |\n|---|{'---|' * len(results)}")
    for name in next(iter(results.values())):
        print(f"| {name} | {' | '.join(f'{result[name]:,.2f}' for result in results.values())} |")


if __name__ == "__main__":
    main()
