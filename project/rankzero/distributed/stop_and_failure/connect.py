"""Connects a rank to the control server of rank zero, through the leader of its node."""

import contextlib
import hmac
import itertools
import secrets
import socket
import time
from typing import NamedTuple

from rankzero.distributed.connections.handshake import DifferentKeyError, WrongListenerError, perform_handshake
from rankzero.distributed.connections.line_connection import LineConnection, keep_alive
from rankzero.distributed.connections.local_socket import connect_locally, is_supported, listen_locally
from rankzero.distributed.coordination import network
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.rendezvous.listening import listening_address
from rankzero.distributed.stop_and_failure.relay import NodeRelay
from rankzero.distributed.timers import TIMERS
from rankzero.messages import AnotherRankFailed


class Endpoint(NamedTuple):
    """Where the control server listens.

    Args:
        host: Address of the TCP socket.
        port: Port of the TCP socket; 0 if there is none, since all ranks are on rank zero's machine.
        name: Random text from which the names of Unix sockets and locks are derived.
        has_local_socket: Whether rank zero listens on a Unix socket too.
    """

    host: str
    port: int
    name: str
    has_local_socket: bool = True

    def derived_name(self, purpose: str, secret: bytes | None) -> str:
        """Returns a name that other users of a machine cannot predict, so that they cannot take it first."""
        return hmac.digest(secret or b"no key", f"{purpose} {self.name}".encode(), "sha256").hex()

    def node_name(self, launch: Launch, secret: bytes | None) -> str:
        """Returns the name of the Unix socket to which the ranks of this node connect."""
        return self.derived_name(f"node {launch.node_rank}", secret)


def listen_for_control(
    launch: Launch, interface: str | None, secret: bytes | None
) -> tuple[Endpoint, list[socket.socket]]:
    """Returns the sockets on which rank zero listens.

    Raises:
        OSError: This process may not listen on the network.
    """
    endpoint = Endpoint("", 0, secrets.token_hex(16))
    local = listen_locally(endpoint.node_name(launch, secret))
    if local and launch.num_nodes == 1:
        return endpoint, [local]
    address = "127.0.0.1"
    if launch.num_nodes != 1:
        own_addresses = [ip for ip in network.resolve(launch.address) if network.is_local_address(ip)]
        address = listening_address(launch, own_addresses, interface)
    listener = network.listen(address, 0)
    host, port = listener.getsockname()[:2]
    endpoint = endpoint._replace(host=host, port=port, has_local_socket=local is not None)
    return endpoint, [listener, *([local] if local else [])]


def connect_rank(
    launch: Launch, endpoint: Endpoint, secret: bytes | None, first_rank: int
) -> tuple[LineConnection, int, NodeRelay | None]:
    """Connects this rank to rank zero, through the leader of its node if possible.

    Returns:
        The connection, the rank at its other end, and the relay of this node, if this rank is the leader of another
        node than rank zero's.

    Raises:
        AnotherRankFailed: No control server of this run with this key is reachable within `TIMERS.connect`.
    """
    name, relay = endpoint.node_name(launch, secret), None
    ranks, has_leader = launch.local_world_size or 1, endpoint.has_local_socket or first_rank != 0
    if launch.rank == first_rank != 0:
        rank_zero = _connect_to_rank_zero(launch, endpoint, secret)
        listener = listen_locally(name) if ranks > 1 else None
        if listener is None:
            return rank_zero, 0, None
        rank_zero.send({"rank": launch.rank})
        relay = NodeRelay(listener, rank_zero, launch.world_id, ranks)
    connection = _connect_to_leader(launch, name) if has_leader else None
    if connection:
        return connection, first_rank, relay
    return _connect_to_rank_zero(launch, endpoint, secret), 0, None


def _connect_to_leader(launch: Launch, name: str) -> LineConnection | None:
    deadline = time.monotonic() + TIMERS.leader * is_supported()
    while time.monotonic() < deadline:
        if connection := connect_locally(name):
            leader = LineConnection(connection)
            with contextlib.suppress(WrongListenerError, DifferentKeyError):
                if perform_handshake(leader, "control", launch.world_id, None, False, TIMERS.connect):
                    connection.settimeout(TIMERS.connect)
                    return leader
        time.sleep(TIMERS.poll)
    return None


def _connect_to_rank_zero(launch: Launch, endpoint: Endpoint, secret: bytes | None) -> LineConnection:
    ips = [endpoint.host]
    if endpoint.host in ("0.0.0.0", "::"):  # all of rank zero's addresses; the reachable one depends on the machine
        ips = ["127.0.0.1"] if launch.rank == 0 else network.resolve(launch.address)
    reason, deadline = "the connection was closed", time.monotonic() + TIMERS.connect
    for ip in itertools.cycle(ips):
        try:
            connection = LineConnection(socket.create_connection((ip, endpoint.port), timeout=TIMERS.attempt))
            connection.connection.settimeout(TIMERS.connect)
            keep_alive(connection.connection)
            if perform_handshake(connection, "control", launch.world_id, secret, secret is not None, TIMERS.connect):
                return connection
        except OSError as error:
            reason = error.strerror or str(error)
        except WrongListenerError:
            reason = "another program listens on this port"
        except DifferentKeyError:
            reason = "its key differs"
        if time.monotonic() > deadline:
            break
        time.sleep(TIMERS.poll)
    server = f"{ips[0]}:{endpoint.port}" if endpoint.port else "this machine"
    raise AnotherRankFailed(f"rank {launch.rank} cannot connect to the control server on {server}: {reason}")
