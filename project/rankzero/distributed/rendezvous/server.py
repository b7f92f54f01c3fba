"""Rank zero's side of the rendezvous, to which all other processes connect."""

import json
import socket
import time
from collections.abc import Sequence
from typing import NamedTuple

from rankzero.distributed.connections.key import Key
from rankzero.distributed.connections.line_connection import MAX_MESSAGE_BYTES, Message, encode_message
from rankzero.distributed.connections.line_server import LineServer, ServedConnection
from rankzero.distributed.coordination.network import reachable_address
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.process.stop_signals import SIGNALS
from rankzero.distributed.rendezvous import errors
from rankzero.distributed.rendezvous.ranks import assign_ranks, node_views
from rankzero.distributed.stop_and_failure.leader import Link
from rankzero.distributed.stop_and_failure.protocol import FROM_LEADER, FROM_RANK, read
from rankzero.distributed.timers import TIMERS, Progress
from rankzero.distributed.world import Peer
from rankzero.messages import RequestError, few

MAX_TRUSTED_BYTES, MAX_UNAUTHENTICATED_BYTES = 1 << 20, 16 << 10
"""Bytes of a message of a process with and without the key; a description is shorter."""


class Claim(NamedTuple):
    """A process that has connected, itself or through the leader of its node."""

    peer: Peer
    connection: ServedConnection


class RendezvousServer:
    """Accepts connections on rank zero until all processes have connected.

    Processes that know the key, and local processes of the same user, belong to the run: a conflict between them is an
    error of the launch. Another process may not belong to the run. So a conflict with it does not end the run, and a
    process with the key takes precedence over it. It is not admitted at all if a process on another machine knows the
    key.

    `listeners` are the socket of the rendezvous, and possibly one for local processes. See `RankZeroSearch` for the
    other arguments; `requires_key` states whether only processes that know the key are admitted.

    Attributes:
        key_problem: Why the run is not authenticated, once `wait` has returned; empty if it is.
        link: The connections to all other processes, once `wait` has returned.
    """

    link: Link

    def __init__(
        self,
        launch: Launch,
        this_peer: Peer,
        listeners: Sequence[socket.socket],
        deadline: float,
        timeout: float,
        key: Key,
        requires_key: bool = False,
    ) -> None:
        self.launch, self.this_peer, self.deadline, self.timeout, self.key = launch, this_peer, deadline, timeout, key
        self.listeners, self.key_problem = listeners, ""
        self._server = LineServer(listeners, launch.world_id, key.secret, requires_key or key.is_explicit)
        self._claims: dict[str, Claim] = {}
        self._by_rank: dict[int, str] = {}
        self._by_connection: dict[ServedConnection, dict[str, None]] = {}
        self._trusted = 0
        self._changed_at = time.monotonic()

    @property
    def members(self) -> list[Peer]:
        """This process, and the processes that have connected."""
        return [self.this_peer, *(claim.peer for claim in self._claims.values())]

    def wait(self, refusal: RequestError | None = None) -> list[Peer]:
        """Waits for all processes, sends each process its position, and returns all processes by rank.

        Args:
            refusal: Error to send instead, to all processes that connect before the deadline.

        Raises:
            RequestError: A process is missing or conflicts with another, or `refusal` is given. All processes raise it.
        """
        progress = Progress(self.timeout)
        try:
            while not self._is_complete():
                if time.monotonic() > self.deadline:
                    raise refusal or self._missing_processes_error()
                progress.print_if_due(self._describe_wait)
                SIGNALS.check_stop_request()
                for connection, messages in self._server.poll(TIMERS.poll):
                    self._handle(connection, messages)
            if refusal:
                raise refusal
        except RequestError as error:
            self._send_refusal(error)
            for listener in self.listeners:
                listener.close()
            raise
        by_trust = sorted(self._claims.values(), key=lambda claim: not claim.connection.is_trusted)
        claims = by_trust[: self.launch.world_size - 1]
        # Processes of the same user on one machine are trusted, but containers may have given them different keys.
        own = self.this_peer
        if others := [peer for peer, end in claims if not (end.is_trusted and peer.has_key_of(own))]:
            self.key_problem = errors.describe_key_problem(self.key, own, others)
        self._server.stop_accepting()
        assigned = assign_ranks([own, *(claim.peer for claim in claims)])
        self._answer(claims, assigned)
        return assigned

    def _views(self, claims: Sequence[Claim], assigned: Sequence[Peer]) -> dict[ServedConnection, bytes]:
        """Returns the answer to each connection: the views of the nodes of its processes, each encoded once."""
        views = [encode_message(view) for view in node_views(assigned)]
        nodes = {peer.id: peer.node_rank or 0 for peer in assigned}
        nodes_of: dict[ServedConnection, dict[int, None]] = {}
        for claim in claims:
            nodes_of.setdefault(claim.connection, {})[nodes[claim.peer.id]] = None
        own_ip = reachable_address(self.listeners[0])
        end = f'], "key_problem": {json.dumps(self.key_problem)}, "ip": "{own_ip}"}}'.encode()
        return {
            connection: b'{"views": [' + b", ".join(views[node] for node in own_nodes) + end
            for connection, own_nodes in nodes_of.items()
        }

    def _is_complete(self) -> bool:
        """Returns whether all processes have connected, with as many untrusted ones as are needed."""
        needed = self.launch.world_size - 1
        if self._trusted >= needed or len(self._claims) < needed:
            return self._trusted >= needed
        # Without a key of its own, rank zero cannot distinguish the processes of the run from others.
        return self.key.secret is None or time.monotonic() > self._changed_at + TIMERS.key

    def _missing_processes_error(self) -> RequestError:
        error = errors.missing_processes_error(self.launch, self.members, self.timeout)
        wrong_keys = self._describe_wrong_keys()
        return RequestError(error.asked, error.found + wrong_keys, errors.SAME_KEY_ADVICE) if wrong_keys else error

    def _describe_wait(self) -> str:
        if len(self._claims) >= self.launch.world_size - 1:
            return "not all ranks have the same key; waiting for ranks that have it"
        missing = errors.describe_missing_ranks(self.launch, self.members)
        return f"{missing}; {len(self.members)} connected{self._describe_wrong_keys()}"

    def _describe_wrong_keys(self) -> str:
        addresses = few(sorted(self._server.wrong_keys))
        return f"; processes without rank 0's key connected from {addresses}" if addresses else ""

    def _handle(self, connection: ServedConnection, messages: list[Message] | None) -> None:
        if messages is None:
            self._forget_all(connection)
        for name, content in (entry for message in messages or () for entry in read(message, FROM_RANK | FROM_LEADER)):
            match name, content:
                case "peer", peer if not connection.is_closed:
                    self._admit(connection, peer)
                case "gone", process if process in self._by_connection.get(connection, ()):
                    self._forget(connection, process)
                    if not self._by_connection[connection]:
                        self._forget_all(connection)
                        self._server.disconnect(connection)

    def _admit(self, connection: ServedConnection, peer: Peer) -> None:
        conflict = self._conflict(connection, peer)
        if conflict and not connection.is_trusted:
            self._refuse(connection, conflict)
            return
        self._server.identify(connection, MAX_TRUSTED_BYTES if connection.is_trusted else MAX_UNAUTHENTICATED_BYTES)
        self._claims[peer.id] = Claim(peer, connection)
        self._by_connection.setdefault(connection, {})[peer.id] = None
        self._trusted += connection.is_trusted
        self._changed_at = time.monotonic()
        if conflict:
            raise conflict
        if peer.rank is not None:
            self._by_rank[peer.rank] = peer.id
        if connection.is_authenticated and peer.machine != self.this_peer.machine and not self._server.requires_key:
            self._require_key()

    def _conflict(self, connection: ServedConnection, peer: Peer) -> RequestError | None:
        """Returns why a process cannot belong to the run. A trusted one takes the place of an untrusted one."""
        if peer.world_size != self.launch.world_size:
            return errors.world_size_error(self.launch, self.this_peer, peer)
        if self._server.requires_key and not peer.has_key_of(self.this_peer):
            return errors.another_key_error(self.launch, self.key, self.this_peer, [peer])
        if peer.rank is not None and peer.rank == self.this_peer.rank:
            return errors.duplicate_rank_error(self.this_peer, peer)
        holder = self._claims.get(peer.id)
        if peer.rank in self._by_rank:
            holder = self._claims[self._by_rank[peer.rank]]
        if holder is None:
            return None
        error = errors.duplicate_rank_error(holder.peer, peer)
        if holder.connection.is_trusted or not connection.is_trusted:
            return error
        self._refuse(holder.connection, error)
        return None

    def _require_key(self) -> None:
        """Refuses all processes without the key, now that another machine is known to have it."""
        self._server.requires_key = True
        # Processes of this user may have another key, in a container with another home directory.
        trusted = [claim.peer for claim in self._claims.values() if claim.connection.is_trusted]
        if others := [peer for peer in trusted if not peer.has_key_of(self.this_peer)]:
            raise errors.another_key_error(self.launch, self.key, self.this_peer, others)
        for connection in [connection for connection in self._by_connection if not connection.is_trusted]:
            self._refuse(connection, errors.different_keys_error(self.launch, self.key))

    def _refuse(self, connection: ServedConnection, error: RequestError) -> None:
        connection.send({"refused": [*error.args], "is_single": True})
        self._server.disconnect(connection)
        self._forget_all(connection)

    def _forget_all(self, connection: ServedConnection) -> None:
        for process in list(self._by_connection.get(connection, ())):
            self._forget(connection, process)
        self._by_connection.pop(connection, None)

    def _forget(self, connection: ServedConnection, process: str) -> None:
        del self._by_connection[connection][process]
        claim = self._claims.get(process)
        if claim is None or claim.connection is not connection:
            return
        del self._claims[process]
        self._trusted -= connection.is_trusted
        if claim.peer.rank is not None and self._by_rank.get(claim.peer.rank) == process:
            del self._by_rank[claim.peer.rank]

    def _send_refusal(self, error: RequestError) -> None:
        """Sends an error to all processes, also to those that connect within `TIMERS.refuse`."""
        body = encode_message({"refused": [*error.args]})
        deadline, answered, processes = time.monotonic() + TIMERS.refuse, set[ServedConnection](), set(self._claims)
        while True:
            for connection in self._server.connections:
                if connection.has_said_hello and connection not in answered:
                    answered.add(connection)
                    connection.send_body(body)
            if len(processes) >= self.launch.world_size - 1 or time.monotonic() > deadline:
                break
            SIGNALS.check_stop_request()
            for _, messages in self._server.poll(TIMERS.poll):
                for message in messages or ():
                    processes.update(peer.id for name, peer in read(message, FROM_RANK) if name == "peer")
        self._server.close(TIMERS.leave)

    def _answer(self, claims: Sequence[Claim], assigned: Sequence[Peer]) -> None:
        """Answers all processes, and disconnects those that do not belong to the run; the listening sockets stay open.

        A process whose connection is lost meanwhile is noticed later.
        """
        answers = self._views(claims, assigned)
        too_many: Message = {
            "refused": [f"a world of {self.launch.world_size}", "more processes than that", "fewer of them"],
            "is_single": True,
        }
        for connection in self._server.connections:
            if answer := answers.get(connection):
                connection.max_line_bytes = MAX_MESSAGE_BYTES if connection.is_trusted else MAX_TRUSTED_BYTES
                connection.send_body(answer)
            else:
                if connection.has_said_hello:
                    connection.send(too_many)
                self._server.disconnect(connection)
        ranks_of = {peer.id: peer.rank or 0 for peer in assigned}
        ranks = {  # the leader of a node is the first on its connection
            connection: [ranks_of[process] for process in self._by_connection[connection] if process in ranks_of]
            for connection in answers
        }
        self._server.flush(TIMERS.leave)
        own, own_served = self._server.connect_own()
        listener = next((listener for listener in self.listeners if listener.family != socket.AF_UNIX), None)
        self.link = Link(own, 0, self._server, {own_served: [0], **ranks}, listener=listener)
