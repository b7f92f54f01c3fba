"""The leader's end of the control channels of a node: passes messages on to rank zero and back."""

import threading
import time

from rankzero.distributed.connections.line_connection import LineConnection, Message, encode_message
from rankzero.distributed.connections.line_server import LineServer, ServedConnection
from rankzero.distributed.monitoring.status import ReportSchedule, Status
from rankzero.distributed.timers import TIMERS


class NodeRelay:
    """Connects the ranks of a node to rank zero, in a thread.

    It passes each message on unchanged, except the ranks' statuses, which it sends together.
    """

    def __init__(self, server: LineServer, ranks: dict[ServedConnection, int], rank_zero: LineConnection) -> None:
        self.rank_zero, self.size, self._server, self._ranks = rank_zero, len(ranks), server, ranks
        self._statuses: dict[int, tuple[Status | None, float]] = {}
        self._schedules = {rank: ReportSchedule() for rank in ranks.values()}
        self._requested: set[int] = set()
        self._left: set[int] = set()
        self._finish_at = float("inf")
        rank_zero.connection.setblocking(False)
        self._server.watch(rank_zero)
        self._thread = threading.Thread(target=self._serve, name="control relay", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Waits up to `TIMERS.leave` for the other ranks of this node to leave."""
        self._finish_at = time.monotonic() + TIMERS.leave
        self._thread.join(TIMERS.leave + TIMERS.slow_poll)

    def _serve(self) -> None:
        checked_at = time.monotonic()
        is_connected = self._pass_on_from_rank_zero()  # what arrived with the answer of the rendezvous
        while is_connected and len(self._left) < self.size and time.monotonic() < self._finish_at:
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
            self._send_all({"lost": self.rank_zero.close_reason})
        elif len(self._left) < self.size:  # this rank has finished before the others, which is no failure
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
        due = {
            rank for rank, status in statuses.items() if self._schedules[rank].is_due(status, rank in self._requested)
        }
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
