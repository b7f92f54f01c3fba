"""Connects a rank to the control server of rank zero. Does not import torch."""

import itertools
import socket
import time

from rankzero.distributed import network
from rankzero.distributed.connections.handshake import DifferentKeyError, WrongListenerError, perform_handshake
from rankzero.distributed.connections.line_connection import LineConnection, keep_alive
from rankzero.distributed.environments.launch import Launch
from rankzero.messages import AnotherRankFailed

CONNECT_SECONDS = 30.0
_RETRY_SECONDS = 0.1


def connect_to_control_server(launch: Launch, host: str, port: int, secret: bytes | None) -> LineConnection:
    """Returns an open connection to the control server.

    Args:
        launch: The position of this process among all processes.
        host: The address on which rank zero listens.
        port: The port on which rank zero listens.
        secret: The key that all ranks know; None if they do not share one.

    Raises:
        AnotherRankFailed: No control server of this run with this key is reachable within `CONNECT_SECONDS`.
    """
    ips = [host]
    if host in ("0.0.0.0", "::"):  # all of rank zero's addresses; which one is reachable depends on the machine
        ips = ["127.0.0.1"] if launch.rank == 0 else network.resolve(launch.address)
    reason, deadline = "the connection was closed", time.monotonic() + CONNECT_SECONDS
    for ip in itertools.cycle(ips):
        try:
            connection = LineConnection(socket.create_connection((ip, port), timeout=CONNECT_SECONDS))
            keep_alive(connection.connection)
            if perform_handshake(connection, "control", launch.world_id, secret, secret is not None, CONNECT_SECONDS):
                return connection
        except OSError as error:
            reason = error.strerror or str(error)
        except WrongListenerError:
            reason = "another program listens on this port"
        except DifferentKeyError:
            reason = "its key differs"
        if time.monotonic() > deadline:
            break
        time.sleep(_RETRY_SECONDS)
    raise AnotherRankFailed(f"rank {launch.rank} cannot connect to the control server on {ips[0]}:{port}: {reason}")
