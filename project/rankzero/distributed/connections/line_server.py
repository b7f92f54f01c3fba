"""Accepts connections from the processes of a run, and limits unauthenticated ones.

A connection that has not identified itself costs little: such connections are limited in number, in the length of
their lines and in time.
"""

import contextlib
import errno
import resource
import selectors
import socket
import time
from collections.abc import Iterable, Sequence
from typing import Any

from rankzero.distributed.connections.handshake import KEY_REQUIRED, MAX_HANDSHAKE_BYTES, Challenge, answer_to_hello
from rankzero.distributed.connections.line_connection import (
    CLOSED_IN_CHILDREN,
    FORK_LOCK,
    MAX_MESSAGE_BYTES,
    LineConnection,
    Message,
    keep_alive,
)
from rankzero.distributed.connections.local_socket import is_own_user
from rankzero.distributed.timers import TIMERS

MAX_UNIDENTIFIED = 8192
"""The limit of the number of unidentified connections, or half of the process's limit of open files if that is less."""

MAX_FILES = 131_072
"""The highest limit of open files that a process sets for itself; some programs try to close each possible file."""

_ACCEPTED_AT_ONCE = 256
_MAX_WAITING = 4096
_MAX_WRONG_KEYS = 100


class ServedConnection(LineConnection):
    """A connection that a `LineServer` has accepted.

    Attributes:
        address: IP address of the client, for messages.
        is_local: Whether the client is a process of the same user on this machine, according to the kernel.
        has_said_hello: Whether the handshake is complete, with or without a proof.
        is_identified: Whether the client belongs to the run, as far as the owner of the server knows.
    """

    def __init__(self, connection: socket.socket, challenge: Challenge, unsent: "set[ServedConnection]") -> None:
        super().__init__(connection, MAX_HANDSHAKE_BYTES)
        self.challenge, self.accepted_at, self._waiting_to_send = challenge, time.monotonic(), unsent
        self.is_local = connection.family == socket.AF_UNIX
        self.address = "this machine" if self.is_local else str(connection.getpeername()[0])
        self.has_said_hello = self.is_identified = self.is_closed = False

    @property
    def is_trusted(self) -> bool:
        """Whether the client belongs to this user."""
        return self.is_authenticated or self.is_local

    def _send(self, data: bytes) -> None:
        super()._send(data)
        if self.has_unsent_bytes:
            self._waiting_to_send.add(self)


class LineServer:
    """Listens on sockets, performs the handshake with each client and receives messages.

    The owner calls `poll` again and again, and `identify` for each client that it recognizes.

    Args:
        listeners: The listening sockets, which the owner closes. Clients of a Unix socket have to belong to the same
            user, and need no key.
        world_id: Identifier of the run's start.
        secret: The key; None if there is none.
        requires_key: Whether clients that do not know the key are refused.

    Attributes:
        wrong_keys: Some IP addresses of clients that have proven no knowledge of the key.
    """

    def __init__(
        self, listeners: Sequence[socket.socket], world_id: str, secret: bytes | None, requires_key: bool
    ) -> None:
        self.listeners, self.world_id, self.secret, self.requires_key = listeners, world_id, secret, requires_key
        self.wrong_keys: set[str] = set()
        self.max_unidentified = min(MAX_UNIDENTIFIED, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._connections: dict[socket.socket, ServedConnection] = {}
        self._unidentified: dict[ServedConnection, None] = {}  # in the order in which they were accepted
        self._waiting_to_send: set[ServedConnection] = set()
        self._selector = selectors.DefaultSelector()
        self._is_accepting: bool | None = False  # None: never again
        for listener in listeners:
            CLOSED_IN_CHILDREN.add(listener)
            listener.setblocking(False)
        self._accept_connections(True)

    def poll(self, seconds: float) -> list[tuple[ServedConnection, list[Message] | None]]:
        """Serves the connections for up to `seconds`, until messages have arrived.

        Returns:
            Connections with their new messages; None instead of messages for a connection that is lost and closed.
        """
        self._close_late_connections()
        for connection in [self._waiting_to_send.pop() for _ in range(len(self._waiting_to_send))]:
            connection.flush()
        is_waiting = bool(self._waiting_to_send) or self._is_accepting is False
        events = []  # a connection may be closed while an earlier event is handled
        for key, _ in self._selector.select(min(seconds, TIMERS.poll) if is_waiting else seconds):
            ready: Any = key.fileobj
            if ready in self.listeners:
                self._accept(ready)
            elif ready in self._connections and (received := self._receive(self._connections[ready])) is not None:
                events.append(received)
        return events

    @property
    def connections(self) -> Iterable[ServedConnection]:
        return list(self._connections.values())

    def identify(self, connection: ServedConnection, max_line_bytes: int = MAX_MESSAGE_BYTES) -> None:
        """Marks a connection as one of the run's: it may stay open, and may send messages of this length."""
        connection.is_identified, connection.max_line_bytes = True, max_line_bytes
        self._unidentified.pop(connection, None)

    def connect_own(self) -> tuple[LineConnection, ServedConnection]:
        """Connects this process to its own server; returns both ends."""
        own, served = socket.socketpair()
        served.setblocking(False)
        connection = ServedConnection(served, Challenge("", ""), self._waiting_to_send)
        connection.has_said_hello = True
        self._add(connection)
        self.identify(connection)
        return LineConnection(own), connection

    def watch(self, connection: LineConnection) -> None:
        """Makes `poll` return when data arrives on another connection, which the owner reads."""
        self._selector.register(connection.connection, selectors.EVENT_READ)

    def disconnect(self, connection: ServedConnection) -> None:
        """Closes a connection, if it is still open."""
        if not connection.is_closed:
            connection.is_closed = True
            self._selector.unregister(connection.connection)
            del self._connections[connection.connection]
            self._unidentified.pop(connection, None)
            connection.close()

    def stop_accepting(self) -> None:
        """Accepts no more connections, and closes those that wait on the listening sockets, which stay open."""
        self._accept_connections(False)
        self._is_accepting = None
        for listener in self.listeners:
            with contextlib.suppress(OSError):
                for _ in range(_MAX_WAITING):
                    listener.accept()[0].close()

    def flush(self, seconds: float) -> None:
        """Sends what clients have not yet read; waits up to `seconds` for identified ones. Receives nothing."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(
            connection.has_unsent_bytes and connection.is_identified for connection in self.connections
        ):
            for connection in self.connections:
                connection.flush()
            time.sleep(TIMERS.poll)

    def close(self, seconds: float = 0.0) -> None:
        """Closes all connections, after the identified clients have read everything or `seconds` have passed.

        The listening sockets stay open.
        """
        self.flush(seconds)
        for connection in self.connections:
            self.disconnect(connection)
        self._selector.close()

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            if not self._has_room():
                self._accept_connections(False)
                return
            try:
                with FORK_LOCK:
                    client, _ = listener.accept()
                    CLOSED_IN_CHILDREN.add(client)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE) and self._unidentified:
                    self.disconnect(next(iter(self._unidentified)))
                self._accept_connections(False)  # until the next poll
                return
            self._greet(client)

    def _greet(self, client: socket.socket) -> None:
        try:
            client.setblocking(False)
            if client.family != socket.AF_UNIX:
                keep_alive(client)
            elif not is_own_user(client):
                raise PermissionError
            connection = ServedConnection(client, Challenge.new(self.world_id), self._waiting_to_send)
            connection.send_line(connection.challenge.line())
        except OSError:
            client.close()
            return
        self._add(connection)

    def _add(self, connection: ServedConnection) -> None:
        self._connections[connection.connection] = connection
        self._unidentified[connection] = None
        self._selector.register(connection.connection, selectors.EVENT_READ)

    def _receive(self, connection: ServedConnection) -> tuple[ServedConnection, list[Message] | None] | None:
        if not connection.has_said_hello:
            is_open = connection.read_available()
            if (line := connection.pop_line()) is not None:
                is_open = self._answer_hello(connection, line) and is_open
            if not is_open:
                self.disconnect(connection)
            if not is_open or not connection.has_said_hello:
                return None
        if (messages := connection.receive(0)) is None:
            self.disconnect(connection)
        return (connection, messages) if messages or messages is None else None

    def _answer_hello(self, connection: ServedConnection, line: bytes) -> bool:
        """Answers the first line of a client; returns False if the client is refused."""
        if (answer := answer_to_hello(connection.challenge, line, self.secret)) is None:
            return False
        text, session_keys = answer
        if session_keys is None and self.secret and not connection.is_local and len(self.wrong_keys) < _MAX_WRONG_KEYS:
            self.wrong_keys.add(connection.address)
        if session_keys is None and self.requires_key and not connection.is_local:
            connection.send_line(KEY_REQUIRED.encode())
            return False
        connection.send_line(text)
        if session_keys is not None:
            connection.sign_messages(session_keys.server, session_keys.client)
        connection.has_said_hello = True
        return True

    def _has_room(self) -> bool:
        """Returns whether another connection may be accepted; closes the oldest unidentified one if that makes room."""
        if len(self._unidentified) < self.max_unidentified:
            return True
        oldest = next(iter(self._unidentified))
        if time.monotonic() - oldest.accepted_at < TIMERS.make_room:
            return False
        self.disconnect(oldest)
        return True

    def _close_late_connections(self) -> None:
        limit = time.monotonic() - TIMERS.identify
        while self._unidentified and (oldest := next(iter(self._unidentified))).accepted_at < limit:
            self.disconnect(oldest)
        if self._is_accepting is False and self._has_room():
            self._accept_connections(True)

    def _accept_connections(self, accepts: bool) -> None:
        if accepts != self._is_accepting:
            self._is_accepting = accepts
            for listener in self.listeners:
                if accepts:
                    self._selector.register(listener, selectors.EVENT_READ)
                else:
                    self._selector.unregister(listener)


def raise_file_limit() -> None:
    """Raises this process's limit of open files to the hard limit, or to `MAX_FILES`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with contextlib.suppress(OSError, ValueError):  # macOS has a lower limit than the one that it reports
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
