"""Rank zero's side of the rendezvous, to which all other processes connect. Does not import torch."""

import socket
import time

from rankzero.distributed.connections.key import Key
from rankzero.distributed.connections.line_connection import Message, encode_message
from rankzero.distributed.connections.line_server import LineServer, ServedConnection
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.process.stop_signals import SIGNALS
from rankzero.distributed.rendezvous.errors import (
    SAME_KEY_ADVICE,
    describe_key_problem,
    describe_missing_ranks,
    different_keys_error,
    duplicate_rank_error,
    missing_processes_error,
    world_size_error,
)
from rankzero.distributed.rendezvous.peers import Peer
from rankzero.distributed.rendezvous.progress import Progress
from rankzero.messages import RequestError, few

UNAUTHENTICATED_SECONDS = 10.0
"""How long rank zero, which has a key, waits for processes with the key before it admits others in their place."""

MAX_UNAUTHENTICATED = 64
"""How many processes without the key may wait, in addition to the size of the world."""

ANSWER_SECONDS = 5.0
"""How long a client may take to read the answer."""

_POLL_SECONDS = 0.1


class RendezvousServer:
    """Accepts connections on rank zero until all processes have connected.

    Processes that know the key belong to the run: a conflict between them is an error of the launch. A process without
    the key may be a stranger. So its conflicts do not concern the run, a process with the key takes precedence over it,
    and it is not admitted at all if a process on another machine knows the key.

    Args:
        launch: The position of this process among all processes.
        this_peer: The description of this process.
        listener: The listening socket.
        deadline: Time, in seconds of `time.monotonic`, at which the wait ends.
        timeout: The seconds from the start of the wait to `deadline`, for messages.
        key: The key of this process.
        requires_key: Whether only processes that know the key are admitted.

    Attributes:
        key_problem: Why the run is not authenticated, once `wait` has returned; empty if it is.
    """

    def __init__(
        self,
        launch: Launch,
        this_peer: Peer,
        listener: socket.socket,
        deadline: float,
        timeout: float,
        key: Key,
        requires_key: bool = False,
    ) -> None:
        self.launch, self.this_peer, self.deadline, self.timeout, self.key = launch, this_peer, deadline, timeout, key
        self.key_problem = ""
        requires_key = requires_key or key.is_explicit
        self._server = LineServer(listener, "rendezvous", launch.world_id, key.secret, requires_key)
        self._peers: dict[ServedConnection, Peer] = {}
        self._by_rank: dict[int, ServedConnection] = {}
        self._authenticated = 0
        self._changed_at = time.monotonic()

    @property
    def members(self) -> list[Peer]:
        """This process, and the processes that have connected."""
        return [self.this_peer, *self._peers.values()]

    def wait(self, refusal: RequestError | None = None) -> list[Peer]:
        """Waits for all processes, sends each of them the list of all, and returns that list.

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
                for connection, messages in self._server.poll(_POLL_SECONDS):
                    self._handle(connection, messages)
            if refusal:
                raise refusal
        except RequestError as error:
            self._answer({}, {"refused": [*error.args]})
            self._server.listener.close()
            raise
        chosen = dict(sorted(self._peers.items(), key=lambda item: not item[0].is_authenticated))
        chosen = dict(list(chosen.items())[: self.launch.world_size - 1])
        members = [self.this_peer, *chosen.values()]
        unauthenticated = [peer for connection, peer in chosen.items() if not connection.is_authenticated]
        if unauthenticated:
            self.key_problem = describe_key_problem(
                self.key.secret is not None, self.key.origin, self.this_peer, unauthenticated
            )
        answer = {"members": [member._asdict() for member in members], "key_problem": self.key_problem}
        too_many = [f"a world of {self.launch.world_size}", "more processes than that", "fewer of them"]
        self._answer(dict.fromkeys(chosen, encode_message(answer)), {"refused": too_many})
        return members

    def _is_complete(self) -> bool:
        """Returns whether all processes have connected, with as many unauthenticated ones as are needed."""
        needed = self.launch.world_size - 1
        if self._authenticated >= needed or len(self._peers) < needed:
            return self._authenticated >= needed
        # Without a key of its own, rank zero cannot distinguish the processes of the run from strangers.
        return self.key.secret is None or time.monotonic() > self._changed_at + UNAUTHENTICATED_SECONDS

    def _missing_processes_error(self) -> RequestError:
        error = missing_processes_error(self.launch, self.members, self.timeout)
        if self._server.wrong_keys:
            return RequestError(error.asked, f"{error.found}; {self._describe_wrong_keys()}", SAME_KEY_ADVICE)
        return error

    def _describe_wait(self) -> str:
        if len(self._peers) >= self.launch.world_size - 1:
            return "the ranks do not have the same key; waiting for ranks that have it"
        missing = describe_missing_ranks(self.launch, self.members)
        wrong_keys = f"; {self._describe_wrong_keys()}" if self._server.wrong_keys else ""
        return f"{missing}; {len(self.members)} connected{wrong_keys}"

    def _describe_wrong_keys(self) -> str:
        return f"processes without rank 0's key connected from {few(sorted(self._server.wrong_keys))}"

    def _handle(self, connection: ServedConnection, messages: list[Message] | None) -> None:
        if messages is None:
            self._forget(connection)
        elif not connection.is_identified and messages and (peer := Peer.from_message(messages[0])):
            self._admit(connection, peer)

    def _admit(self, connection: ServedConnection, peer: Peer) -> None:
        conflict = self._conflict(connection, peer)
        if conflict and not connection.is_authenticated:
            self._refuse(connection, conflict)
            return
        self._server.identify(connection)
        self._peers[connection] = peer
        self._authenticated += connection.is_authenticated
        self._changed_at = time.monotonic()
        if conflict:
            raise conflict
        if peer.rank is not None:
            self._by_rank[peer.rank] = connection
        if connection.is_authenticated and peer.machine != self.this_peer.machine:
            self._require_key()
        elif len(self._peers) - self._authenticated > MAX_UNAUTHENTICATED + self.launch.world_size:
            oldest = next(connection for connection in self._peers if not connection.is_authenticated)
            self._refuse(oldest, different_keys_error(self.launch, self.key))

    def _conflict(self, connection: ServedConnection, peer: Peer) -> RequestError | None:
        """Returns why a process cannot belong to the run; it takes the place of one that does not know the key."""
        if peer.world_size != self.launch.world_size:
            return world_size_error(self.launch, self.this_peer, peer)
        if peer.rank is None:
            return None
        if peer.rank == self.this_peer.rank:
            return duplicate_rank_error(self.this_peer, peer)
        if holder := self._by_rank.get(peer.rank):
            error = duplicate_rank_error(self._peers[holder], peer)
            if holder.is_authenticated or not connection.is_authenticated:
                return error
            self._refuse(holder, error)
        return None

    def _require_key(self) -> None:
        """Refuses all processes without the key, now that another machine is known to have it."""
        self._server.requires_key = True
        for connection in [connection for connection in self._peers if not connection.is_authenticated]:
            self._refuse(connection, different_keys_error(self.launch, self.key))

    def _refuse(self, connection: ServedConnection, error: RequestError) -> None:
        connection.send({"refused": [*error.args]})
        self._server.disconnect(connection)
        self._forget(connection)

    def _forget(self, connection: ServedConnection) -> None:
        peer = self._peers.pop(connection, None)
        if peer is not None:
            self._authenticated -= connection.is_authenticated
            if peer.rank is not None and self._by_rank.get(peer.rank) is connection:
                del self._by_rank[peer.rank]

    def _answer(self, answers: dict[ServedConnection, bytes], other_answer: Message) -> None:
        """Answers all processes and disconnects them; the listening socket stays open."""
        for connection in self._server.connections:
            if connection.has_said_hello:  # a lost connection is ignored; its launcher reports that
                connection.send_body(answers.get(connection) or encode_message(other_answer))
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline and self._server.has_unsent_bytes:
            self._server.poll(_POLL_SECONDS)
        self._server.close()
