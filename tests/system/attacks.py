"""Attacks the ports of a machine until it is killed.

python attacks.py attack HOST PORT RECORDING [SEED]
python attacks.py record INTERFACE RECORDING           # needs root

The attack knows the protocol, but not the key. PORT is the port of the rendezvous, then of PyTorch's store; all other
open ports of the machine are found by a scan. The program prints each new port and, after each scan, the number of
attacks, which does not count idle connections. RECORDING is a file with what the ranks of the run have sent, which the
attack repeats and alters.
"""

import contextlib
import json
import random
import socket
import sys
import threading
import time
from pathlib import Path

from rankzero.distributed.stop_and_failure.protocol import FROM_LEADER, FROM_RANK, FROM_SERVER, Many
from rankzero.distributed.world import Peer

IDLE_CONNECTIONS = 600
"""Idle connections to each port at a time."""

recording: list[Path] = []
"""The file with what the ranks have sent."""

attacks: list[int] = []
"""The port of each attack so far."""


def main() -> None:
    if sys.argv[1] == "record":
        record(sys.argv[2], Path(sys.argv[3]))
    host, port, seed = sys.argv[2], int(sys.argv[3]), int((sys.argv[5:] or ["0"])[0])
    recording.append(Path(sys.argv[4]))
    attacked = {port}
    start_attacks(host, port, seed)
    while True:
        print(f"{len(attacks)} attacks", flush=True)
        for found in open_ports(host):
            if found not in attacked:
                attacked.add(found)
                print(f"attacking port {found}", flush=True)
                start_attacks(host, found, seed)


def start_attacks(host: str, port: int, seed: int) -> None:
    """Attacks a port from several threads."""
    for number in range(4):
        threading.Thread(target=attack, args=(host, port, f"{seed} {port} {number}"), daemon=True).start()
    threading.Thread(target=hold_idle_connections, args=(host, port), daemon=True).start()


def record(interface: str, file: Path) -> None:
    """Appends what is sent to this machine over TCP, one segment per line, in hexadecimal digits."""
    all_protocols = 3  # ETH_P_ALL
    with (
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(all_protocols)) as packets,
        file.open("a") as log,
    ):
        packets.bind((interface, 0))
        while True:
            packet, (_, _, kind, *_) = packets.recvfrom(65536)
            is_tcp = packet[12:14] == b"\x08\x00" and packet[23] == socket.IPPROTO_TCP
            if not is_tcp or kind == socket.PACKET_OUTGOING:
                continue
            start = 14 + 4 * (packet[14] & 15)
            payload = packet[start + 4 * (packet[start + 12] >> 4) : 14 + int.from_bytes(packet[16:18], "big")]
            if 0 < len(payload) < 4096:  # gradients are longer
                log.write(payload.hex() + "\n")
                log.flush()


def recorded_segments() -> list[bytes]:
    """Returns what the ranks of the run have sent so far."""
    with contextlib.suppress(OSError, ValueError):
        return [bytes.fromhex(line) for line in recording[0].read_text().splitlines()[-2000:]]
    return []


def open_ports(host: str) -> list[int]:
    """Scans the range of ports from which the operating system chooses."""
    found = []
    for port in range(32768, 61000):
        with socket.socket() as probe:
            probe.settimeout(0.05)
            if probe.connect_ex((host, port)) == 0:
                found.append(port)
    return found


def attack(host: str, port: int, seed: str) -> None:
    """Sends one attack after another to a port."""
    generator = random.Random(seed)
    while True:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=2) as connection:
            attacks.append(port)
            generator.choice(ATTACKS)(connection, generator)
        time.sleep(0.005)


def random_bytes(connection: socket.socket, generator: random.Random) -> None:
    connection.sendall(generator.randbytes(generator.choice((1, 20, 3000, 200_000))))
    connection.sendall(b"\n" * generator.randrange(3))


def nested_json(connection: socket.socket, generator: random.Random) -> None:
    connection.sendall(b"[" * 60_000 + b"\n")


def long_line(connection: socket.socket, generator: random.Random) -> None:
    for _ in range(50):
        connection.sendall(b"x" * 100_000)


def http_request(connection: socket.socket, generator: random.Random) -> None:
    connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    connection.recv(1000)


def impostor(connection: socket.socket, generator: random.Random) -> None:
    """Follows the protocol, without the key, as a rank that wants to stop or to end the run."""
    connection.makefile("rb").readline(4096)
    proof = generator.choice(("-", generator.randbytes(32).hex()))
    connection.sendall(f"{generator.randbytes(16).hex()} {proof}\n".encode())
    time.sleep(generator.choice((0, 0.05)))
    rank = generator.choice((0, 1, 1, 1, 2, -1))
    for message in messages(rank, generator):
        connection.sendall(json.dumps(message).encode() + b"\n")
    time.sleep(generator.choice((0, 0.05, 6)))


def messages(rank: int, generator: random.Random) -> list[object]:
    size = generator.choice((2, 2, 2, 8))
    peer = {"peer": description(rank, size, generator)}
    return generator.choice(
        (
            [peer],
            [peer, *({"rank": rank, **entry(FROM_RANK, generator)} for _ in range(5))],
            [{"rank": rank, "stop": "an attacker"}, {"rank": rank, "failed": "by an attacker"}],
            [peer, *(entry(FROM_LEADER, generator) for _ in range(3)), entry(FROM_SERVER, generator)],
            [{"rank": rank, "status": [0] * 10}, {"statuses": [[rank, None]]}, [], 7, None, {"gone": "1"}],
        )
    )


def entry(types: dict[str, tuple[object, str]], generator: random.Random) -> dict[str, object]:
    """Returns a message of one of some types, with content that may be valid."""
    name = generator.choice(sorted(types))
    return {name: content(types[name][0], generator)}


def description(rank: int, size: int, generator: random.Random) -> dict[str, object]:
    peer = Peer(rank, 0, rank, size, "attacker", 7, "b", cores="0", id=str(rank))
    return peer._replace(key_fingerprint=generator.choice(("", "0" * 64)))._asdict()


def content(expected: object, generator: random.Random) -> object:
    if generator.random() < 0.8:
        match expected:
            case list():
                return [content(element, generator) for element in expected]
            case dict():
                return {name: content(element, generator) for name, element in expected.items()}
            case Many(element):
                return [content(element, generator) for _ in range(3)]
        if expected is Peer:
            return description(1, 2, generator)
    return generator.choice(("stop", "an attacker's", "0" * 64, 0, 1, 1 << 70, -1, True, None, [], {}, [[1, None]]))


def replay(connection: socket.socket, generator: random.Random) -> None:
    """Repeats what a rank has sent, from a random place on."""
    if segments := recorded_segments():
        start = generator.randrange(len(segments))
        for segment in segments[start : start + 5]:
            connection.sendall(segment)
            time.sleep(0.01)


def mutation(connection: socket.socket, generator: random.Random) -> None:
    """Sends altered copies of what a rank has sent."""
    for segment in generator.choices(recorded_segments() or [b"{}"], k=3):
        altered = bytearray(segment)
        for _ in range(generator.randrange(1, 6)):
            altered[generator.randrange(len(altered))] = generator.randrange(256)
        connection.sendall(bytes(altered[: generator.randrange(1, len(altered) + 1)]) + b"\n" * generator.randrange(2))


def slow_reader(connection: socket.socket, generator: random.Random) -> None:
    """Sends much and reads nothing."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    for _ in range(100):
        connection.sendall(f"{generator.randbytes(16).hex()} -\n".encode() * 10)
        time.sleep(0.01)


def half_open(connection: socket.socket, generator: random.Random) -> None:
    connection.shutdown(socket.SHUT_WR)
    time.sleep(0.2)


def reset(connection: socket.socket, generator: random.Random) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.sendall(b"RANKZERO")


ATTACKS = (
    *(random_bytes, nested_json, long_line, http_request, half_open, reset, slow_reader),
    *(impostor, impostor, impostor, replay, replay, mutation, mutation),
)


def hold_idle_connections(host: str, port: int) -> None:
    """Keeps many idle connections to a port open, and replaces those that the server closes."""
    connections: list[socket.socket] = []
    while True:
        with contextlib.suppress(OSError):
            connections.append(socket.create_connection((host, port), timeout=2))
        if len(connections) >= IDLE_CONNECTIONS:
            connections.pop(0).close()
            time.sleep(0.02)


if __name__ == "__main__":
    main()
