"""The connections of one process to the other ranks, from the rendezvous to the end of the run."""

import socket
from dataclasses import dataclass, field

from rankzero.distributed.connections.line_connection import LineConnection
from rankzero.distributed.connections.line_server import LineServer, ServedConnection
from rankzero.distributed.stop_and_failure.leader import NodeLeader


@dataclass
class Link:
    """The connections of one process after the rendezvous.

    Args:
        connection: The connection to rank zero, or to the leader of this node.
        leader: The rank at the other end of `connection`, which may be this one.
        server: Rank zero's server; None elsewhere.
        ranks: The connections of `server`, with their ranks, the leader of a node first.
        listener: Rank zero's TCP socket, on which torch's store will listen; else None.
        node_leader: The leader of this node, in its own process; None elsewhere, and on rank zero.
    """

    connection: LineConnection
    leader: int = 0
    server: LineServer | None = None
    ranks: dict[ServedConnection, list[int]] = field(default_factory=dict)
    listener: socket.socket | None = None
    node_leader: NodeLeader | None = None

    def close(self) -> None:
        """Closes all connections, as the exit of the process does."""
        for opened in (self.server, self.node_leader, self.connection, self.listener):
            if opened:
                opened.close()
