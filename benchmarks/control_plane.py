"""Load on rank zero of connections, agreements and stops, with the real servers and simulated nodes.

python benchmarks/control_plane.py                      # 1,024 ranks as 128 x 8 and 1,024 x 1, and 4,096 x 8
python benchmarks/control_plane.py --worlds 16x4 --seconds 5

Another process simulates all other nodes, so that this process has only the load of rank zero. The time of the
agreement, of the stop and of the failure ends when the last rank has received it.
"""

import argparse
import json
import multiprocessing
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from simulated_nodes import KEY, TIMEOUT, WORLD_ID, Shape, control_clients, rendezvous_clients, store_clients

from rankzero.distributed.connections.line_connection import LineConnection
from rankzero.distributed.connections.line_server import raise_file_limit
from rankzero.distributed.coordination import network
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.monitoring.status import report_interval
from rankzero.distributed.rendezvous.ranks import assign_ranks
from rankzero.distributed.rendezvous.server import RendezvousServer
from rankzero.distributed.world import World


class Clients:
    """A process that simulates all other nodes."""

    def __init__(self, work: Callable[[Shape, int, Connection], None], world: Shape, port: int) -> None:
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


def measure_rendezvous(world: Shape) -> dict[str, float]:
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


def measure_agreement(world: Shape) -> dict[str, float]:
    """Returns the time of one exchange through the store, and the CPU time and operations of the store's server."""
    from torch._C._distributed_c10d import TCPStore

    from rankzero.distributed.coordination.store import StoreExchange

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


def measure_control(world: Shape, seconds: float) -> dict[str, float]:
    """Returns the CPU time of rank zero during training in percent, and the seconds of a stop and of a failure."""
    from rankzero.distributed.stop_and_failure.server import ControlServer

    listener = network.listen("127.0.0.1", 0)
    peers = dict(enumerate(assign_ranks(world.peers())))
    known = World(Launch(world_size=world.size), peers)
    server = ControlServer(
        [listener], known, False, lambda rank: "", WORLD_ID, KEY.secret, report_interval(world.nodes)
    )
    clients = Clients(control_clients, world, listener.getsockname()[1])
    own = LineConnection(socket.create_connection(listener.getsockname()))
    join_as_rank_zero(own)
    clients.receive()
    while server.connected < world.size:
        time.sleep(0.1)
    started, cpu = time.monotonic(), time.process_time()
    clients.pipe.send(max(seconds, 3 * server.interval + 1))
    sent, reports = clients.receive()
    percent = 100 * (time.process_time() - cpu) / (time.monotonic() - started)
    stop, failure = clients.receive(), clients.receive()
    clients.pipe.send("end")
    clients.close()
    own.send({"rank": 0, "leaving": True})  # ends the server, which would add to the load of the next world
    return {
        "control CPU (%)": percent,
        "control bytes (MB)": sent / 1e6,
        "control reports": reports,
        "stop (s)": stop,
        "failure (s)": failure,
    }


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
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="simulated training; longer if rank zero requests rarely"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    raise_file_limit()
    results = {}
    for text in arguments.worlds:
        world = Shape(*map(int, text.split("x")))
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
