"""Rank zero's end of all control channels: stop requests, failures and lost ranks. Does not import torch.

The messages, of which a connection transmits each as a line of JSON:

    rank -> server   {"rank": r, "token": w}  {"stop": reason}  {"position": n}  {"failed": cause}  {"leaving": true}
                     {"status": the values of a `Status`, or null outside training}
    server -> rank   {"stop_requested": reason}  {"stop_at": n}  {"done": true}  {"hang": description}
                     {"failed": cause, "by": the reporting rank}  {"rank_zero": phase and step of rank zero}
"""

import contextlib
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence

from rankzero.distributed.monitoring.detector import HangDetector
from rankzero.distributed.monitoring.heartbeat import HEARTBEAT_SECONDS
from rankzero.distributed.monitoring.slow_ranks import SlowRankDetector
from rankzero.distributed.monitoring.status import Status
from rankzero.distributed.rendezvous.peers import Peer
from rankzero.distributed.stop_and_failure.connection import (
    CLOSED_IN_CHILDREN,
    FORK_LOCK,
    JsonLineConnection,
    Message,
    keep_alive,
)
from rankzero.messages import print_error

FINISH_SECONDS = 5.0
MISSING_RANK_SECONDS = 60.0

LAUNCHER_REPORTS = -1
"""Stands for the reporting rank if the process that started the local processes reports the failure."""


class ControlServer:
    """Rank zero's end of all control channels, which runs in a thread.

    Args:
        listener: The socket to which the ranks connect.
        members: All processes, by rank.
        parent_reports_lost_ranks: Whether the process that started the ranks reports a lost rank, so that no rank has
            to.
        describe_exit: Describes how a rank ended; empty if that is unknown.

    Attributes:
        token: Secret that a rank has to send when it connects.
        on_hang: Called with the description of a hang, in the thread of the server; returns whether the run ends.
        slow_ranks: Finds ranks that are slower than the others.
    """

    def __init__(
        self,
        listener: socket.socket,
        members: Sequence[Peer],
        parent_reports_lost_ranks: bool,
        describe_exit: Callable[[int], str] = lambda rank: "",
    ) -> None:
        self.listener, self.members, self.parent_reports_lost_ranks, self.describe_exit = (
            listener,
            members,
            parent_reports_lost_ranks,
            describe_exit,
        )
        self.token = secrets.token_hex(8)
        self.on_hang: Callable[[str], bool] = lambda description: False
        hosts = [member.host for member in members]
        self._hangs, self.slow_ranks = HangDetector(hosts), SlowRankDetector(hosts)
        CLOSED_IN_CHILDREN.add(listener)
        listener.setblocking(False)
        self._ranks: dict[int, JsonLineConnection] = {}
        self._clients: dict[socket.socket, JsonLineConnection] = {}
        self._exited_ranks: set[int] = set()
        self._positions: dict[int, int] = {}
        self._stop_reason: str | None = None
        self._failure: Message | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="control server", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Announces that rank zero exits, and waits up to `FINISH_SECONDS` for the other ranks to leave."""
        self._send_all({"done": True})
        self._thread.join(FINISH_SECONDS)

    def _serve(self) -> None:
        last_heartbeat = started = time.monotonic()
        while len(self._exited_ranks) < len(self.members):
            for key, _ in self._selector.select(HEARTBEAT_SECONDS):
                self._receive(key.fileobj)  # type: ignore[arg-type]
            if time.monotonic() - last_heartbeat >= HEARTBEAT_SECONDS:
                last_heartbeat = time.monotonic()
                self._send_all({"rank_zero": self._hangs.last_place(0)})
                self._check_for_missing_ranks(last_heartbeat - started)
                self._check_progress()
        self._selector.close()
        self.listener.close()

    def _receive(self, ready_socket: socket.socket) -> None:
        if ready_socket is self.listener:
            with contextlib.suppress(OSError), FORK_LOCK:
                client, _ = self.listener.accept()
                keep_alive(client)
                client.settimeout(5)
                self._clients[client] = JsonLineConnection(client)
                self._selector.register(client, selectors.EVENT_READ)
            return
        connection = self._clients[ready_socket]
        rank = next((rank for rank, admitted in self._ranks.items() if admitted is connection), None)
        messages = connection.receive(0)
        if rank is None and messages == [] and connection.has_partial_line:
            return
        if rank is None and messages:
            rank = self._admit(connection, messages)
        if messages is None or rank is None:
            self._disconnect(ready_socket)
            self._handle_disconnect(rank, connection.close_reason)
            return
        for message in messages:
            self._handle_message(rank, message)

    def _admit(self, connection: JsonLineConnection, messages: Sequence[Message]) -> int | None:
        """Admits a new connection and returns its rank; None for an unknown client."""
        greeting = next(iter(messages), {})
        rank = greeting.get("rank")
        if greeting.get("token") != self.token or not isinstance(rank, int) or rank not in range(len(self.members)):
            return None
        self._ranks[rank] = connection
        if self._failure:
            connection.send(self._failure)
        elif self._stop_reason:
            connection.send({"stop_requested": self._stop_reason})
        return rank

    def _handle_disconnect(self, rank: int | None, close_reason: str) -> None:
        """Handles a closed connection; unless the rank has announced its exit, the run has failed."""
        if rank is not None and rank not in self._exited_ranks:
            self._exited_ranks.add(rank)
            name, place = f"rank {rank} on {self.members[rank].host}", self._hangs.last_place(rank)
            cause = f"{name} {self.describe_exit(rank) or f'was lost{close_reason}'}"
            if place and self.parent_reports_lost_ranks and self._failure is None:
                print_error(f"{name} was last seen in {place}")
            elif place:
                cause += f", last seen in {place}"
            self._record_failure(cause, LAUNCHER_REPORTS if self.parent_reports_lost_ranks else 0)

    def _check_for_missing_ranks(self, seconds: float) -> None:
        missing = [member for member in self.members if member.rank not in self._ranks]
        if missing and seconds > MISSING_RANK_SECONDS:
            self._record_failure(f"rank {missing[0].rank} on {missing[0].host} did not open its control connection", 0)

    def _check_progress(self) -> None:
        for report in self.slow_ranks.new_reports():
            print_error(report)
        if description := self._hangs.new_hang():
            self._send_all({"hang": description})
            if self.on_hang(description):
                self._record_failure(description, 0)

    def _disconnect(self, client: socket.socket) -> None:
        self._selector.unregister(client)
        del self._clients[client]
        client.close()

    def _handle_message(self, rank: int, message: Message) -> None:
        if "stop" in message and self._stop_reason is None:
            self._stop_reason = str(message["stop"])
            self._send_all({"stop_requested": self._stop_reason})
        elif "position" in message:
            self._positions[rank] = int(message["position"])
        elif "leaving" in message:
            self._exited_ranks.add(rank)
            self._hangs.update(rank, None)
        elif "status" in message:
            status = Status.from_message(message["status"])
            self._hangs.update(rank, status)
            self.slow_ranks.update(rank, status.first_gradient if status else 0.0)
        elif "failed" in message:
            self._record_failure(str(message["failed"]), rank)
        if self._stop_reason and ("position" in message or "leaving" in message):
            self._decide_stop()

    def _decide_stop(self) -> None:
        """Once all positions are known, has all ranks stop at the safe point after the most advanced position."""
        if set(self._positions) | self._exited_ranks >= set(range(len(self.members))) and self._positions:
            self._send_all({"stop_at": max(self._positions.values()) + 1})

    def _record_failure(self, cause: str, reporting_rank: int) -> None:
        """Records the first failure, which ends the run, and sends it to all ranks."""
        if self._failure is None:
            self._failure = {"failed": cause, "by": reporting_rank}
            self._send_all(self._failure)

    def _send_all(self, message: Message | None) -> None:
        for rank, connection in list(self._ranks.items()):  # any thread may send while the server admits ranks
            if rank not in self._exited_ranks:
                connection.send(message)
