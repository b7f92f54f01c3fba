"""Load on rank zero of connections, agreements and stops, with the real servers and simulated nodes.

python benchmarks/control_plane.py                      # 1,024 ranks as 128 x 8 and 1,024 x 1, and 4,096 x 8
python benchmarks/control_plane.py --worlds 16x4 --seconds 5

Another process simulates all other nodes, so that this process has only the load of rank zero. The time of the
agreement, of the stop and of the failure ends when the last rank has received it.
"""

import argparse
import json
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from simulated_nodes import KEY, TIMEOUT, WORLD_ID, Shape, simulate

from rankzero.distributed.connections.line_connection import LineConnection
from rankzero.distributed.connections.line_server import raise_file_limit
from rankzero.distributed.coordination import network
from rankzero.distributed.environments.launch import Launch
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


def measure(world: Shape, seconds: float) -> dict[str, float]:
    """Returns CPU time, bytes and durations of each phase of a run, on rank zero."""
    from rankzero.distributed.stop_and_failure.exchange import Exchange
    from rankzero.distributed.stop_and_failure.server import ControlServer

    listener = network.listen("127.0.0.1", 0)
    launch = Launch(
        launcher="env", rank=0, world_size=world.size, num_nodes=world.nodes, world_id=WORLD_ID,
        local_world_size=world.ranks,
    )  # fmt: skip
    clients = Clients(simulate, world, listener.getsockname()[1])
    cpu, deadline = time.process_time(), time.monotonic() + TIMEOUT
    rendezvous = RendezvousServer(launch, world.peers()[0], [listener], deadline, TIMEOUT, KEY)
    peers = dict(enumerate(rendezvous.wait()))
    results = {"rendezvous CPU (s)": time.process_time() - cpu}
    assert len(peers) == world.size
    results["rendezvous bytes (MB)"] = clients.receive() / 1e6

    link, known = rendezvous.link, World(launch, peers)
    exchange = Exchange(known, lambda message: None, lambda message: server.send_all(message), lambda: None)
    server = ControlServer(link.server, link.ranks, known, exchange, lambda rank: "")
    answer_as_rank_zero(link.connection)
    started, cpu = time.monotonic(), time.process_time()
    clients.pipe.send("start")
    assert exchange.decide(None, len, TIMEOUT, "starting") == world.size
    clients.receive()
    results["agreement (s)"] = time.monotonic() - started
    results["agreement CPU (s)"] = time.process_time() - cpu

    started, cpu = time.monotonic(), time.process_time()
    clients.pipe.send(max(seconds, 3 * server.interval + 1))
    sent, reports = clients.receive()
    results["control CPU (%)"] = 100 * (time.process_time() - cpu) / (time.monotonic() - started)
    results["control bytes (MB)"], results["control reports"] = sent / 1e6, reports
    results["stop (s)"], results["failure (s)"] = clients.receive(), clients.receive()
    clients.pipe.send("end")
    clients.close()
    link.connection.send({"rank": 0, "leaving": True})  # ends the server, which would add to the load of the next world
    listener.close()
    return results


def answer_as_rank_zero(connection: LineConnection) -> None:
    """Answers stop requests as rank zero itself, in a thread."""

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
        results[text] = measure(world, arguments.seconds)
    if arguments.json:
        print(json.dumps(results))
        return
    print(f"| rank zero | {' | '.join(results)} |\n|---|{'---|' * len(results)}")
    for name in next(iter(results.values())):
        print(f"| {name} | {' | '.join(f'{result[name]:,.2f}' for result in results.values())} |")


if __name__ == "__main__":
    main()
