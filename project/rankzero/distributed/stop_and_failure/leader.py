"""Connections of a process from the rendezvous to the end, and the leader that connects those of a node."""

import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rankzero.distributed.connections.line_connection import LineConnection, Message, encode_message
from rankzero.distributed.connections.line_server import LineServer, ServedConnection
from rankzero.distributed.monitoring.hangs import ReportSchedule, Status
from rankzero.distributed.stop_and_failure.protocol import FROM_RANK, read
from rankzero.distributed.timers import TIMERS
from rankzero.distributed.world import Peer
from rankzero.messages import RequestError


class NodeLeader:
    """Accepts the other processes of a node, and passes messages between them and rank zero.

    After the rendezvous, a thread passes each message on; it collects the statuses of ranks and sends them together.

    Args:
        listeners: The Unix sockets to which the other processes of the node connect.
        world_id: Identifier of the run's start.

    Attributes:
        rank_zero: The connection to rank zero, once it has answered.
    """

    rank_zero: LineConnection

    def __init__(self, listeners: Sequence[socket.socket], world_id: str) -> None:
        self._server = LineServer(listeners, world_id, None, requires_key=False)
        self._peers: dict[ServedConnection, Peer] = {}
        self._ranks: dict[ServedConnection, int] = {}
        self._statuses: dict[int, tuple[Status | None, float]] = {}
        self._requested: set[int] = set()
        self._left: set[int] = set()
        self._finish_at = float("inf")

    # The rendezvous

    def introduce_all(self, rank_zero: LineConnection) -> None:
        """Sends the descriptions of the processes that have connected so far, over a new connection."""
        for peer in self._peers.values():
            rank_zero.send({"peer": peer._asdict()})

    def introduce_new(self, rank_zero: LineConnection | None) -> None:
        """Notes which processes connect or disconnect within a short time, and tells `rank_zero`, if given."""
        for connection, messages in self._server.poll(TIMERS.poll):
            message: Message = {}
            peer = dict(read(messages[0], FROM_RANK)).get("peer") if messages else None
            if messages is None and connection in self._peers:
                message = {"gone": self._peers.pop(connection).id}
            elif peer and connection not in self._peers:
                self._server.identify(connection)
                self._peers[connection] = peer
                message = {"peer": peer._asdict()}
            if message and rank_zero:
                rank_zero.send(message)

    def answer(self, message: Message, rank: int) -> LineConnection:
        """Sends rank zero's answer to the other processes of the node, and disconnects those without a rank.

        Returns:
            The connection of this process, which has the rank `rank`, to its own server.
        """
        self._close_listeners()
        ranks = {peer["id"]: peer["rank"] for view in message["views"] for peer in view["peers"]}
        for connection in self._peers:
            connection.send(message)
        self._server.flush(TIMERS.leave)
        self._ranks = {connection: ranks[peer.id] for connection, peer in self._peers.items() if peer.id in ranks}
        for connection in self._server.connections:
            if connection not in self._ranks:
                self._server.disconnect(connection)
        return self.connect_own(rank)

    def connect_own(self, rank: int) -> LineConnection:
        """Connects a rank in this process; returns its end of the connection."""
        own, served = self._server.connect_own()
        self._ranks[served] = rank
        return own

    def refuse(self, error: RequestError, count: int | None) -> None:
        """Sends an error to the `count` - 1 other processes of the node, or for `TIMERS.refuse`."""
        deadline, answered = time.monotonic() + TIMERS.refuse, set[ServedConnection]()
        while time.monotonic() < deadline and len(answered) + 1 != count:
            for connection in self._peers.keys() - answered:
                connection.send({"refused": [*error.args]})
                answered.add(connection)
            self.introduce_new(None)
        self._close_listeners()
        self._server.close(TIMERS.leave)

    def _close_listeners(self) -> None:
        self._server.stop_accepting()
        for listener in self._server.listeners:
            listener.close()

    # The control channel

    def start(self) -> None:
        """Starts the thread, which owns all connections from now on."""
        self.rank_zero.connection.setblocking(False)
        self._schedules = {rank: ReportSchedule() for rank in self._ranks.values()}
        self._server.watch(self.rank_zero)
        self.thread = threading.Thread(target=self._serve, name="leader of the node", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Closes all connections, if the thread has not been started."""
        self._server.close()
        self.rank_zero.close()

    def finish(self, seconds: float) -> None:
        """Lets the thread end once the other ranks of this node have left, or after `seconds`."""
        self._finish_at = time.monotonic() + seconds

    def _serve(self) -> None:
        checked_at = time.monotonic()
        is_connected = self._pass_on_from_rank_zero()  # what arrived with the answer of the rendezvous
        while is_connected and len(self._left) < len(self._ranks) and time.monotonic() < self._finish_at:
            pause = TIMERS.poll if self.rank_zero.has_unsent_bytes else TIMERS.heartbeat
            for connection, messages in self._server.poll(min(pause, self._finish_at - time.monotonic())):
                self._receive(connection, messages)
            is_connected = self._pass_on_from_rank_zero()
            if time.monotonic() - checked_at >= TIMERS.heartbeat:
                checked_at = time.monotonic()
                self._report()
                self._send_all(None)
            self.rank_zero.flush()
        if not is_connected:
            self._send_all({"rank_zero_lost": self.rank_zero.close_reason})
        elif len(self._left) < len(self._ranks):  # this rank has finished before the others, which is no failure
            self._send_all({"done": True})
            for rank in set(self._ranks.values()) - self._left:
                self.rank_zero.send({"rank": rank, "leaving": True})
        deadline = time.monotonic() + TIMERS.leave
        while self.rank_zero.has_unsent_bytes and time.monotonic() < deadline:
            time.sleep(TIMERS.poll)
            self.rank_zero.flush()
        self._server.close(TIMERS.leave)
        self.rank_zero.close()

    def _report(self) -> None:
        """Sends rank zero the statuses that are due, each once; forgets those of ranks that have stopped reporting."""
        oldest = time.monotonic() - 2 * TIMERS.heartbeat
        statuses = {rank: status for rank, (status, received_at) in self._statuses.items() if received_at >= oldest}
        due = {rank for rank in statuses if self._schedules[rank].is_due(statuses[rank], rank in self._requested)}
        self._statuses = {rank: self._statuses[rank] for rank in statuses if rank not in due}
        self._requested -= due
        if due:
            self.rank_zero.send({"statuses": [(rank, statuses[rank]) for rank in due]})

    def _receive(self, connection: ServedConnection, messages: list[Message] | None) -> None:
        rank = self._ranks[connection]
        if messages is None:
            if rank not in self._left:
                self._leave(rank)
                self.rank_zero.send({"rank": rank, "lost": connection.close_reason})
            return
        for message in messages:
            if message and message.get("rank") != rank:
                continue
            if "status" in message:
                self._statuses[rank] = Status.from_message(message["status"]), time.monotonic()
            elif message:
                self.rank_zero.send(message)
            if "leaving" in message:
                self._leave(rank)

    def _leave(self, rank: int) -> None:
        self._left.add(rank)
        self._statuses.pop(rank, None)  # otherwise it would seem to be training again

    def _pass_on_from_rank_zero(self) -> bool:
        """Sends rank zero's messages to all ranks of the node; returns False if the connection is lost."""
        while messages := self.rank_zero.receive(0):
            for message in messages:
                if "rank_zero" in message:
                    self._requested = set(self._ranks.values()) - self._left
                    self._report()
                self._send_all(message)
        return messages is not None

    def _send_all(self, message: Message | None) -> None:
        body = encode_message(message)
        for connection, rank in self._ranks.items():
            if rank not in self._left:
                connection.send_body(body)


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
