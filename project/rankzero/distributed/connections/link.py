"""The connections of one process to the other ranks, from the rendezvous to the end of the run."""

import socket
from dataclasses import dataclass, field

from rankzero.distributed.connections.line_connection import LineConnection
from rankzero.distributed.connections.line_server import LineServer, ServedConnection


@dataclass
class Link:
    """The connections of one process after the rendezvous.

    Args:
        connection: The connection to rank zero, or to the leader of this node.
        name: Random text, which is the same on all ranks.
        leader: The rank at the other end of `connection`.
        server: The server of rank zero, or of a leader; else None.
        ranks: The connections of `server`, with their ranks, the leader of a node first.
        rank_zero: The connection of a leader to rank zero; None on all other ranks.
        listener: Rank zero's TCP socket, on which torch's store will listen; else None.
    """

    connection: LineConnection
    name: str
    leader: int = 0
    server: LineServer | None = None
    ranks: dict[ServedConnection, list[int]] = field(default_factory=dict)
    rank_zero: LineConnection | None = None
    listener: socket.socket | None = None

    def close(self) -> None:
        """Closes all connections, as the exit of the process does."""
        if self.server:
            self.server.close()
        for opened in (self.connection, self.rank_zero, self.listener):
            if opened:
                opened.close()
