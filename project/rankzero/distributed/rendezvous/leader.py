"""The leader of a node, which connects the processes of the node to rank zero. Does not import torch."""

import socket
import time

from rankzero.distributed.connections.line_connection import LineConnection, Message
from rankzero.distributed.connections.line_server import LineServer, ServedConnection
from rankzero.distributed.connections.local_socket import is_supported, listen_locally
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.timers import TIMERS
from rankzero.distributed.world import Peer
from rankzero.messages import RequestError


def uses_leader(launch: Launch) -> bool:
    """Returns whether the processes of this node connect through a leader."""
    return is_supported() and not launch.is_single_machine and launch.local_world_size != 1


def leader_name(launch: Launch) -> str:
    """Returns the name under which the leader of this node listens."""
    return f"rendezvous {launch.world_id} {launch.address}:{launch.port} {launch.node_rank}"


def listen_as_leader(launch: Launch) -> socket.socket | None:
    """Returns the leader's listening socket; None if this process is not the leader."""
    is_candidate = uses_leader(launch) and launch.local_rank in (0, None)
    return listen_locally(leader_name(launch)) if is_candidate else None


class NodeLeader:
    """Accepts the other processes of the node and passes their descriptions on to rank zero."""

    def __init__(self, listener: socket.socket, world_id: str) -> None:
        self._listener = listener
        self._server = LineServer([listener], "rendezvous", world_id, None, requires_key=False)
        self._peers: dict[ServedConnection, Peer] = {}

    def introduce_all(self, rank_zero: LineConnection) -> None:
        """Sends the descriptions of the processes that have connected so far, over a new connection."""
        for peer in self._peers.values():
            rank_zero.send({"peer": peer._asdict()})

    def serve(self, rank_zero: LineConnection) -> None:
        """Passes on processes that connect or disconnect within a short time."""
        for peer, is_new in self._receive():
            rank_zero.send({"peer": peer._asdict()} if is_new else {"gone": peer.id})

    def _receive(self) -> list[tuple[Peer, bool]]:
        """Returns the processes that connect, with True, or disconnect within a short time."""
        changes = []
        for connection, messages in self._server.poll(TIMERS.poll):
            if messages is None:
                if lost_peer := self._peers.pop(connection, None):
                    changes.append((lost_peer, False))
                continue
            peer = Peer.from_message(messages[0].get("peer")) if messages else None
            if peer and connection not in self._peers:
                self._server.identify(connection)
                self._peers[connection] = peer
                changes.append((peer, True))
        return changes

    def answer(self, message: Message) -> None:
        """Sends rank zero's answer to the other processes of the node."""
        self._listener.close()
        for connection in self._peers:
            connection.send(message)
        self._server.close(TIMERS.leave)

    def refuse(self, error: RequestError, count: int | None) -> None:
        """Sends an error to the other processes of the node, for up to `TIMERS.refuse`."""
        deadline, answered = time.monotonic() + TIMERS.refuse, set[ServedConnection]()
        while time.monotonic() < deadline and len(answered) + 1 != count:
            for connection in self._peers.keys() - answered:
                connection.send({"refused": [*error.args]})
                answered.add(connection)
            self._receive()
        self._listener.close()
        self._server.close(TIMERS.leave)
