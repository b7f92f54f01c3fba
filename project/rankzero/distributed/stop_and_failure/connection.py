"""A connection that transmits messages, and that forked processes close. Does not import torch.

Each message is one line of JSON. An empty line is a heartbeat.
"""

import contextlib
import json
import os
import selectors
import socket
import threading
import weakref
from typing import Any

Message = dict[str, Any]


CLOSED_IN_CHILDREN: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()
"""Sockets that a forked process closes; a loader process would otherwise keep them open after its rank is killed."""

FORK_LOCK = threading.Lock()
"""Locked while a connection is accepted and added to `CLOSED_IN_CHILDREN`, so that no fork happens between the two."""


def _close_in_child() -> None:
    """Closes the sockets in a forked process."""
    for connection in list(CLOSED_IN_CHILDREN):
        connection.close()
    FORK_LOCK.release()


os.register_at_fork(before=FORK_LOCK.acquire, after_in_parent=FORK_LOCK.release, after_in_child=_close_in_child)


class JsonLineConnection:
    """Sends and receives messages over a socket.

    Args:
        connection: The connected socket.

    Attributes:
        close_reason: How the connection ended, as text that follows "was lost".
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.close_reason = ""
        self._received = b""
        self._selector = selectors.DefaultSelector()  # select() supports only descriptors up to 1,023
        self._selector.register(connection, selectors.EVENT_READ)
        self._lock = threading.Lock()
        CLOSED_IN_CHILDREN.add(connection)

    @property
    def has_partial_line(self) -> bool:
        """Whether an incomplete message is buffered, of less than 64 KiB."""
        return 0 < len(self._received) < 1 << 16

    def send(self, message: Message | None) -> None:
        """Sends a message, or a heartbeat for None. Any thread may call; a lost connection is ignored."""
        line = b"\n" if message is None else json.dumps(message).encode() + b"\n"
        with self._lock, contextlib.suppress(OSError):
            self.connection.sendall(line)

    def receive(self, seconds: float) -> list[Message] | None:
        """Waits up to `seconds` for data and returns the messages in it; None if the connection is lost.

        A heartbeat is returned as an empty message.

        Args:
            seconds: 0 if data is known to be available.
        """
        if seconds and not self._selector.select(seconds):
            return []
        try:
            received = self.connection.recv(1 << 16)
        except OSError as error:
            received, self.close_reason = b"", f" ({error.strerror or error})"
        if not received:
            self.close_reason = self.close_reason or " (killed? out of memory?)"
            return None
        *lines, self._received = (self._received + received).split(b"\n")
        return [message for message in map(_parse_message, lines) if message is not None]


def _parse_message(line: bytes) -> Message | None:
    try:
        message = json.loads(line) if line else {}
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def keep_alive(connection: socket.socket) -> None:
    """Configures TCP so that the kernel detects a broken connection within about 15 seconds."""
    options = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 15_000}
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        if hasattr(socket, name):  # Linux has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
