"""A connection that transmits lines and messages, and that forked processes close.

Each message is one line of JSON. An empty message is a heartbeat. After a successful handshake, each line begins with a
signature, so that no other process can add, alter, repeat or reorder messages.
"""

import contextlib
import hmac
import json
import os
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from typing import Any

from rankzero.distributed.timers import TIMERS

Message = dict[str, Any]

MAX_MESSAGE_BYTES = 64 << 20
"""Bytes of the longest message of a process of the run: the values of all ranks, such as their hosts."""

MAX_UNSENT_BYTES = 4 << 20
"""Bytes that wait for a client that does not read; if another message follows, the client counts as lost."""

_SIGNATURE_LENGTH = 32

CLOSED_IN_CHILDREN: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()
"""Sockets that a forked process closes; a loader process would otherwise keep them open after its rank is killed."""

FORK_LOCK = threading.Lock()
"""Locked while a connection is accepted and added to `CLOSED_IN_CHILDREN`, so that no fork happens between the two."""


def _close_in_child() -> None:
    for connection in list(CLOSED_IN_CHILDREN):
        connection.close()
    FORK_LOCK.release()


os.register_at_fork(before=FORK_LOCK.acquire, after_in_parent=FORK_LOCK.release, after_in_child=_close_in_child)


class LineConnection:
    """Sends and receives lines and messages over a socket.

    Sending to a non-blocking socket never waits: `flush` sends the rest later.

    Args:
        connection: The connected socket.
        max_line_bytes: Bytes of the longest line to receive. A longer one ends the connection.

    Attributes:
        close_reason: How the connection ended, as text that follows "was lost".
    """

    def __init__(self, connection: socket.socket, max_line_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self.connection, self.max_line_bytes, self.close_reason = connection, max_line_bytes, ""
        self._lines: deque[bytes] = deque()
        self._partial_line = bytearray()
        self._unsent = bytearray()
        self._signing_key: bytes | None = None
        self._verification_key: bytes | None = None
        self._sent = self._verified = 0
        self._selector: selectors.DefaultSelector | None = None
        self._lock = threading.Lock()
        CLOSED_IN_CHILDREN.add(connection)

    @property
    def is_authenticated(self) -> bool:
        """Whether both ends have proven that they know the key."""
        return self._signing_key is not None

    def sign_messages(self, signing_key: bytes, verification_key: bytes) -> None:
        """Signs and verifies all messages from now on."""
        self._signing_key, self._verification_key = signing_key, verification_key

    # Sending

    def send(self, message: Message | None) -> None:
        """Sends a message, or a heartbeat for None. Any thread may call; a lost connection is ignored."""
        self.send_body(encode_message(message))

    def send_body(self, body: bytes) -> None:
        """Sends an encoded message. Any thread may call; a lost connection is ignored."""
        with self._lock:
            if self._signing_key is not None:
                body = _signature(self._signing_key, self._sent, body) + body
                self._sent += 1
            self._send(body + b"\n")

    def send_line(self, line: bytes) -> None:
        """Sends a line without a signature, for the handshake."""
        with self._lock:
            self._send(line + b"\n")

    @property
    def has_unsent_bytes(self) -> bool:
        """Whether `flush` has something to send."""
        return bool(self._unsent)

    def flush(self) -> None:
        """Sends as much as possible of what a non-blocking socket has not yet accepted."""
        with self._lock:
            self._send(b"")

    def _send(self, data: bytes) -> None:
        try:
            if self.connection.gettimeout() != 0:
                self.connection.sendall(data)
                return
            if data and len(self._unsent) > MAX_UNSENT_BYTES:
                self._end(" (it does not read its control connection)")
                return
            self._unsent += data
            while self._unsent:
                del self._unsent[: self.connection.send(self._unsent)]
        except BlockingIOError:
            return
        except TimeoutError:  # a part of the line may have been sent
            self._end(" (it does not accept messages)")
        except OSError:
            self._unsent.clear()

    def _end(self, close_reason: str) -> None:
        """Makes the next `receive` return None."""
        self._unsent.clear()
        self.close_reason = close_reason
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    # Receiving

    def receive(self, seconds: float, only_first: bool = False) -> list[Message] | None:
        """Waits up to `seconds` for data and returns the messages in it; None if the connection is lost.

        A heartbeat is returned as an empty message. Malformed messages are skipped; a wrong signature ends the
        connection.

        Args:
            seconds: 0 if data is known to be available.
            only_first: Whether to return one message, and the others at the next call.
        """
        if not self._lines:
            is_open = self._wait_for_data(seconds) is not True or self.read_available()
            if not is_open and not self._lines:
                return None
        messages: list[Message] = []
        while self._lines and not (messages and only_first):
            if (body := self._verified_body(self._lines.popleft())) is None:
                self.close_reason = " (a message has a wrong signature)"
                return None
            with contextlib.suppress(ValueError, RecursionError):  # invalid, or nested too deeply
                message = json.loads(body) if body else {}
                if isinstance(message, dict):
                    messages.append(message)
        return messages

    def receive_line(self, seconds: float) -> bytes | None:
        """Waits up to `seconds` for a line without a signature; None if the connection ends.

        Raises:
            TimeoutError: No line has arrived in time.
        """
        deadline = time.monotonic() + seconds
        while not self._lines:
            if not self._wait_for_data(max(deadline - time.monotonic(), 0.0)):
                raise TimeoutError
            if not self.read_available():
                break
        return self.pop_line()

    def pop_line(self) -> bytes | None:
        """Returns a line that has been received and not returned; None if there is none."""
        return self._lines.popleft() if self._lines else None

    def read_available(self) -> bool:
        """Reads the available data; returns False if the connection is lost or the line is too long."""
        try:
            received = self.connection.recv(1 << 16)
        except (BlockingIOError, InterruptedError):
            return True
        except ConnectionResetError:  # the process was killed before it read everything
            received = b""
        except OSError as error:
            received, self.close_reason = b"", self.close_reason or f" ({error.strerror or error})"
        if not received:
            self.close_reason = self.close_reason or " (killed? out of memory?)"
            return False
        *lines, rest = received.split(b"\n")
        if lines:
            lines[0] = bytes(self._partial_line) + lines[0]
            self._lines.extend(lines)
            self._partial_line.clear()
        self._partial_line += rest
        if max((len(self._partial_line), *map(len, self._lines))) > self.max_line_bytes:
            self._lines.clear()
            self.close_reason = " (it sent too long a line)"
            return False
        return True

    def close(self) -> None:
        self.connection.close()
        if self._selector is not None:
            self._selector.close()

    def _wait_for_data(self, seconds: float) -> bool:
        if not seconds:
            return True
        if self._selector is None:
            self._selector = selectors.DefaultSelector()  # select() supports only descriptors up to 1,023
            self._selector.register(self.connection, selectors.EVENT_READ)
        return bool(self._selector.select(seconds))

    def _verified_body(self, line: bytes) -> bytes | None:
        if self._verification_key is None:
            return line
        signature, body = line[:_SIGNATURE_LENGTH], line[_SIGNATURE_LENGTH:]
        if not hmac.compare_digest(_signature(self._verification_key, self._verified, body), signature):
            return None
        self._verified += 1
        return body


def encode_message(message: Message | None) -> bytes:
    """Returns a message as one line of JSON, without the end of the line; empty for a heartbeat."""
    return b"" if message is None else json.dumps(message).encode()


def _signature(key: bytes, number: int, body: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + body, "sha256").hex()[:_SIGNATURE_LENGTH].encode()


def keep_alive(connection: socket.socket) -> None:
    """Configures TCP so that the kernel detects a broken connection within about `TIMERS.unreachable`."""
    seconds = max(5, round(TIMERS.unreachable))
    options = {"TCP_KEEPIDLE": seconds // 3, "TCP_KEEPINTVL": seconds // 5, "TCP_KEEPCNT": 3}
    options |= {"TCP_USER_TIMEOUT": 1000 * seconds, "TCP_NODELAY": 1}
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        if hasattr(socket, name):  # Linux has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
