"""Rank zero's end of all control channels: stop requests, failures and lost ranks. Does not import torch.

Each message is one line of JSON. An empty line is a heartbeat.

    rank -> server   {"rank": r, "token": w}  {"stop": reason}  {"position": n}  {"failed": cause}  {"leaving": true}
    server -> rank   {"stop_requested": reason}  {"stop_at": n}  {"done": true}
                     {"failed": cause, "by": the reporting rank}
"""

import contextlib
import json
import os
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from rankzero.distributed.rendezvous.peers import Peer

BEAT_SECONDS = 2.0
"""Time between heartbeats. No code counts them: they only give the kernel data that the other end must acknowledge."""

FINISH_SECONDS = 5.0
ABSENT_SECONDS = 60.0

LAUNCHER_REPORTS = -1
"""Stands for the reporting rank if the process that started the local processes reports the failure."""

Message = dict[str, Any]


class JsonLineConnection:
    """Sends and receives messages over a socket.

    Args:
        connection: The connected socket.

    Attributes:
        why: How the connection ended, as text that follows "is gone".
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.why = ""
        self._received = b""
        self._selector = selectors.DefaultSelector()  # select() supports only descriptors up to 1,023
        self._selector.register(connection, selectors.EVENT_READ)
        self._lock = threading.Lock()
        _OURS.add(connection)

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
            received, self.why = b"", f" ({error.strerror or error})"
        if not received:
            self.why = self.why or " (killed? out of memory?)"
            return None
        *whole, self._received = (self._received + received).split(b"\n")
        return [message for message in map(_read, whole) if message is not None]


_OURS: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()

_FORK_LOCK = threading.Lock()
"""Locked while a connection is accepted and added to `_OURS`, so that no fork happens between the two."""


def _close_in_child() -> None:
    """Closes the connections in a forked process; a loader process would keep them open after its rank is killed."""
    for connection in list(_OURS):
        connection.close()
    _FORK_LOCK.release()


os.register_at_fork(before=_FORK_LOCK.acquire, after_in_parent=_FORK_LOCK.release, after_in_child=_close_in_child)


def _read(line: bytes) -> Message | None:
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


class ControlServer:
    """Rank zero's end of all control channels, which runs in a thread.

    Args:
        listening: The socket to which the ranks connect.
        members: All processes, by rank.
        quiet: Whether the process that started the ranks reports a lost rank, so that no rank has to.
        how_ended: Describes how a rank ended; empty if that is unknown.

    Attributes:
        token: Secret that a rank has to send when it connects.
    """

    def __init__(
        self,
        listening: socket.socket,
        members: Sequence[Peer],
        quiet: bool,
        how_ended: Callable[[int], str] = lambda rank: "",
    ) -> None:
        self.listening, self.members, self.quiet, self.how_ended = listening, members, quiet, how_ended
        self.token = secrets.token_hex(8)
        _OURS.add(listening)
        listening.setblocking(False)
        self._ranks: dict[int, JsonLineConnection] = {}
        self._callers: dict[socket.socket, JsonLineConnection] = {}
        self._left: set[int] = set()
        self._places: dict[int, int] = {}
        self._stop_reason: str | None = None
        self._failure: Message | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="control server", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Announces that rank zero exits, and waits up to `FINISH_SECONDS` for the other ranks to leave."""
        self._send_all({"done": True})
        self._thread.join(FINISH_SECONDS)

    def _serve(self) -> None:
        beaten = began = time.monotonic()
        while len(self._left) < len(self.members):
            for key, _ in self._selector.select(BEAT_SECONDS):
                self._receive(key.fileobj)  # type: ignore[arg-type]
            if time.monotonic() - beaten >= BEAT_SECONDS:
                beaten = time.monotonic()
                self._send_all(None)
                self._look_for_absent(beaten - began)
        self._selector.close()
        self.listening.close()

    def _receive(self, ready: socket.socket) -> None:
        if ready is self.listening:
            with contextlib.suppress(OSError), _FORK_LOCK:
                caller, _ = self.listening.accept()
                keep_alive(caller)
                caller.settimeout(5)
                self._callers[caller] = JsonLineConnection(caller)
                self._selector.register(caller, selectors.EVENT_READ)
            return
        connection = self._callers[ready]
        rank = next((rank for rank, known in self._ranks.items() if known is connection), None)
        messages = connection.receive(0)
        if rank is None and messages == [] and connection.has_partial_line:
            return
        if rank is None and messages:
            rank = self._admitted(connection, messages)
        if messages is None or rank is None:
            self._drop(ready)
            self._note_end(rank, connection.why)
            return
        for message in messages:
            self._take(rank, message)

    def _admitted(self, connection: JsonLineConnection, messages: Sequence[Message]) -> int | None:
        """Admits a new connection and returns its rank; None for an unknown client."""
        hello = next(iter(messages), {})
        rank = hello.get("rank")
        if hello.get("token") != self.token or not isinstance(rank, int) or rank not in range(len(self.members)):
            return None
        self._ranks[rank] = connection
        if self._failure:
            connection.send(self._failure)
        elif self._stop_reason:
            connection.send({"stop_requested": self._stop_reason})
        return rank

    def _note_end(self, rank: int | None, why: str) -> None:
        """Handles a closed connection; unless the rank has announced its exit, the run has failed."""
        if rank is not None and rank not in self._left:
            self._left.add(rank)
            how = self.how_ended(rank) or f"is gone{why}"
            self._fail(f"rank {rank} on {self.members[rank].host} {how}", LAUNCHER_REPORTS if self.quiet else 0)

    def _look_for_absent(self, seconds: float) -> None:
        absent = [member for member in self.members if member.rank not in self._ranks]
        if absent and seconds > ABSENT_SECONDS:
            self._fail(f"rank {absent[0].rank} on {absent[0].host} did not open its control connection", 0)

    def _drop(self, caller: socket.socket) -> None:
        self._selector.unregister(caller)
        del self._callers[caller]
        caller.close()

    def _take(self, rank: int, message: Message) -> None:
        if "stop" in message and self._stop_reason is None:
            self._stop_reason = str(message["stop"])
            self._send_all({"stop_requested": self._stop_reason})
        elif "position" in message:
            self._places[rank] = int(message["position"])
        elif "leaving" in message:
            self._left.add(rank)
        elif "failed" in message:
            self._fail(str(message["failed"]), rank)
        if self._stop_reason and ("position" in message or "leaving" in message):
            self._settle()

    def _settle(self) -> None:
        """Once all positions are known, has all ranks stop at the safe point after the most advanced position."""
        if set(self._places) | self._left >= set(range(len(self.members))) and self._places:
            self._send_all({"stop_at": max(self._places.values()) + 1})

    def _fail(self, cause: str, reporting_rank: int) -> None:
        """Records the first failure, which ends the run, and sends it to all ranks."""
        if self._failure is None:
            self._failure = {"failed": cause, "by": reporting_rank}
            self._send_all(self._failure)

    def _send_all(self, message: Message | None) -> None:
        for rank, connection in list(self._ranks.items()):  # any thread may send while the server admits ranks
            if rank not in self._left:
                connection.send(message)
