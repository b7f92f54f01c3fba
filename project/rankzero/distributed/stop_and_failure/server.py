"""Rank zero's end of all control channels: stop requests, failures and lost ranks. Does not import torch.

The messages, of which a connection transmits each as a line of JSON:

    rank -> server   {"rank": r}  {"stop": reason}  {"position": n}  {"failed": cause}  {"leaving": true}
                     {"status": the values of a `Status`, or null outside training}
    server -> rank   {"stop_requested": reason}  {"stop_at": n}  {"done": true}  {"hang": description}
                     {"failed": cause, "by": the reporting rank}  {"rank_zero": phase and step of rank zero}
"""

import socket
import threading
import time
from collections.abc import Callable, Sequence

from rankzero.distributed.connections.line_connection import Message
from rankzero.distributed.connections.line_server import LineServer, ServedConnection
from rankzero.distributed.monitoring.detector import HangDetector
from rankzero.distributed.monitoring.heartbeat import HEARTBEAT_SECONDS
from rankzero.distributed.monitoring.slow_ranks import SlowRankDetector
from rankzero.distributed.monitoring.status import Status
from rankzero.distributed.rendezvous.peers import Peer
from rankzero.messages import print_error, printable, printable_line

FINISH_SECONDS = 5.0
MISSING_RANK_SECONDS = 60.0

MAX_REASON_LENGTH, MAX_CAUSE_LENGTH = 200, 20_000
"""Characters of the reason of a stop and of the cause of a failure that the ranks receive."""

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
        world_id: Identifier of the run's start.
        secret: The key that all ranks know; None if they do not share one.

    Attributes:
        on_hang: Called with the description of a hang, in the thread of the server; returns whether the run ends.
        slow_ranks: Finds ranks that are slower than the others.
    """

    def __init__(
        self,
        listener: socket.socket,
        members: Sequence[Peer],
        parent_reports_lost_ranks: bool,
        describe_exit: Callable[[int], str] = lambda rank: "",
        world_id: str = "",
        secret: bytes | None = None,
    ) -> None:
        self.listener, self.members, self.parent_reports_lost_ranks, self.describe_exit = (
            listener,
            members,
            parent_reports_lost_ranks,
            describe_exit,
        )
        self.on_hang: Callable[[str], bool] = lambda description: False
        hosts = [member.host for member in members]
        self._hangs, self.slow_ranks = HangDetector(hosts), SlowRankDetector(hosts)
        self._server = LineServer(listener, "control", world_id, secret, requires_key=secret is not None)
        self._ranks: dict[int, ServedConnection] = {}
        self._connected_ranks: dict[ServedConnection, int] = {}
        self._exited_ranks: set[int] = set()
        self._positions: dict[int, int] = {}
        self._stop_reason: str | None = None
        self._failure: Message | None = None
        self._thread = threading.Thread(target=self._serve, name="control server", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Announces that rank zero exits, and waits up to `FINISH_SECONDS` for the other ranks to leave."""
        self._send_all({"done": True})
        self._thread.join(FINISH_SECONDS)

    def _serve(self) -> None:
        last_heartbeat = started = time.monotonic()
        while len(self._exited_ranks) < len(self.members):
            for connection, messages in self._server.poll(HEARTBEAT_SECONDS):
                self._receive(connection, messages)
            if time.monotonic() - last_heartbeat >= HEARTBEAT_SECONDS:
                last_heartbeat = time.monotonic()
                self._send_all({"rank_zero": self._hangs.last_place(0)})
                self._check_for_missing_ranks(last_heartbeat - started)
                self._check_progress()
        self._server.close()
        self.listener.close()

    def _receive(self, connection: ServedConnection, messages: list[Message] | None) -> None:
        rank = self._connected_ranks.get(connection)
        if messages is None:
            self._handle_disconnect(rank, connection.close_reason)
            return
        if rank is None and (rank := self._admit(connection, messages.pop(0))) is None:
            self._server.disconnect(connection)
            return
        for message in messages:
            self._handle_message(rank, message)

    def _admit(self, connection: ServedConnection, greeting: Message) -> int | None:
        """Admits a new connection and returns its rank; None for an unknown client, and for a rank that has one."""
        rank = greeting.get("rank")
        if type(rank) is not int or rank not in range(len(self.members)) or rank in self._ranks:
            return None
        self._server.identify(connection)
        self._ranks[rank], self._connected_ranks[connection] = connection, rank
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

    def _handle_message(self, rank: int, message: Message) -> None:
        match message:
            case {"stop": str() as reason} if self._stop_reason is None:
                self._stop_reason = printable_line(reason[:MAX_REASON_LENGTH])
                self._send_all({"stop_requested": self._stop_reason})
            case {"position": int() as position}:
                self._positions[rank] = position
                self._decide_stop()
            case {"leaving": True}:
                self._exited_ranks.add(rank)
                self._hangs.update(rank, None)
                self._decide_stop()
            case {"status": values}:
                status = Status.from_message(values)
                self._hangs.update(rank, status)
                self.slow_ranks.update(rank, status.first_gradient if status else 0.0)
            case {"failed": str() as cause}:
                self._record_failure(printable(cause[:MAX_CAUSE_LENGTH]), rank)

    def _decide_stop(self) -> None:
        """Once all positions are known, has all ranks stop at the safe point after the most advanced position."""
        if self._stop_reason is None:
            return
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
