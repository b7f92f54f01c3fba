"""Rank zero's end of all control channels: exchanges, stop requests, failures and lost ranks."""

import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from rankzero.distributed.connections.line_connection import Message, encode_message
from rankzero.distributed.connections.line_server import LineServer, ServedConnection
from rankzero.distributed.monitoring import hangs
from rankzero.distributed.stop_and_failure.exchange import Exchange
from rankzero.distributed.stop_and_failure.protocol import FROM_LEADER, FROM_RANK, read
from rankzero.distributed.timers import TIMERS, Progress
from rankzero.distributed.world import World
from rankzero.messages import print_error

PARENT_REPORTS = -1
"""Stands for the reporting rank if the process that started the local processes reports the failure."""


class ControlServer:
    """Rank zero's end of all control channels, which runs in a thread.

    Args:
        server: The server to which all leaders and ranks are connected.
        ranks: The ranks of each connection, the leader of a node first.
        world: All processes.
        exchange: Receives the values of all ranks.
        describe_exit: Describes how a rank ended; empty if that is unknown.

    Attributes:
        interval: Seconds between two requests for the statuses of all ranks.
        on_hang: Called with the description of a hang, in the thread of the server; returns whether the run ends.
        slow_ranks: Finds ranks that are slower than the others.
    """

    def __init__(
        self,
        server: LineServer,
        ranks: Mapping[ServedConnection, list[int]],
        world: World,
        exchange: Exchange,
        describe_exit: Callable[[int], str],
    ) -> None:
        self._server, self._connections, self.world, self._exchange = server, dict(ranks), world, exchange
        self.describe_exit = describe_exit
        self.on_hang: Callable[[str], bool] = lambda description: False
        self.interval, self.size, hosts = hangs.report_interval(world.nodes), world.size, world.hosts
        self._hangs = hangs.HangDetector(hosts, hangs.silence_seconds(self.interval), leader_of=self._leader_of)
        self._start_progress: Progress | None = None
        self.slow_ranks = hangs.SlowRankDetector(hosts)
        self._ranks = {rank: connection for connection, numbers in ranks.items() for rank in numbers}
        self._refusals: dict[str, str] = {}
        self._exited_ranks: set[int] = set()
        self._positions: dict[int, int] = {}
        self._stop_reason: str | None = None
        self._stop_at: int | None = None
        self._answers: dict[str, dict[int, tuple[bool, int]]] = {}
        self._decisions: dict[str, int] = {}
        self._raised: dict[int, str] = {}
        self._failure: Message | None = None
        self._finish_at = math.inf
        self.thread = threading.Thread(target=self._serve, name="control server", daemon=True)
        self.thread.start()

    def finish(self, seconds: float) -> None:
        """Announces the end of rank zero; the thread ends once the other ranks have left, or after `seconds`."""
        self._finish_at = time.monotonic() + seconds
        self.send_all({"done": True})

    def _serve(self) -> None:
        checked_at = requested_at = time.monotonic()
        while len(self._exited_ranks) < self.size and time.monotonic() < self._finish_at:
            for connection, messages in self._server.poll(min(TIMERS.heartbeat, self._finish_at - time.monotonic())):
                self._receive(connection, messages)
            now = time.monotonic()
            if now - checked_at >= min(self.interval, TIMERS.heartbeat):
                checked_at = now
                self._check_for_hang()
            if now - requested_at >= self.interval:
                requested_at = now
                self.send_all({"rank_zero": self._hangs.last_place(0)})
                for report in self.slow_ranks.new_reports():
                    print_error(report)
        self._server.close(TIMERS.leave)

    def _receive(self, connection: ServedConnection, messages: list[Message] | None) -> None:
        if messages is None:
            for rank in self._connections.pop(connection, ()):
                self._handle_lost_rank(rank, connection.close_reason)
            return
        for message in messages:
            sender: Any = message.get("rank")
            if type(sender) is int and self._ranks.get(sender) is connection:
                for name, content in read(message, FROM_RANK):
                    self._handle_entry(sender, name, content)
            for name, content in read(message, FROM_LEADER):
                self._handle_entry_of_leader(connection, name, content)

    def _leader_of(self, rank: int) -> int:
        """Returns the first rank on the connection of a rank; the rank itself if its connection is lost."""
        return self._connections.get(self._ranks[rank], [rank])[0]

    def _handle_lost_rank(self, rank: int, close_reason: str) -> None:
        """Handles a closed connection; unless the rank has announced its exit, the run has failed."""
        if rank in self._exited_ranks:
            return
        self._exited_ranks.add(rank)
        name, place = self.world.name_of(rank), self._hangs.last_place(rank)
        self._hangs.update(rank, None)
        if self._failure:
            return
        cause = f"{name} {self.describe_exit(rank) or f'was lost{close_reason}'}"
        if place and self.world.parent_reports_lost_ranks:
            print_error(f"{name} was last seen in {place}")
        elif place:
            cause += f", last seen in {place}"
        self._record_failure(cause, PARENT_REPORTS if self.world.parent_reports_lost_ranks else 0, is_exiting=False)

    def _check_for_hang(self) -> None:
        if late := self._hangs.late_start():
            self._start_progress = self._start_progress or Progress(math.inf)
            self._start_progress.print_if_due(lambda: late)
        else:
            self._start_progress = None
        if description := self._hangs.new_hang():
            self.send_all({"hang": description})
            if self.on_hang(description):
                self._record_failure(description, 0, is_exiting=False)

    def _handle_entry(self, rank: int, name: str, content: Any) -> None:
        match name, content:
            case "stop", reason if self._stop_reason is None:
                self._stop_reason = reason
                self.send_all({"stop_requested": reason})
            case "position", position:
                self._positions[rank] = position
                self._choose_stop()
            case "answer", [topic, number, is_there, batch] if number == self._decisions.get(topic, 0):
                self._record_answer(topic, rank, is_there, batch)
            case "value", [number, value]:
                self._exchange.receive_value(rank, number, value)
            case "refusal", digest:
                if digest and len(self._refusals) < self.size:
                    self._refusals.setdefault(digest, self.world.name_of(rank))
                self._ranks[rank].send({"refusals": [self._refusals, rank]})
            case "leaving", True:
                self._exited_ranks.add(rank)
                self._exchange.leave(rank)
                self._hangs.update(rank, None)
                self._choose_stop()
                for topic in list(self._answers):
                    self._decide(topic)
            case "status", values:
                self._update(rank, values)
            case "raised", digest:
                self._raised[rank] = digest
                is_same = len(set(self._raised.values())) == 1
                if len(self._raised) == self.size or not is_same:
                    self.send_all({"same_error": is_same})
                    self._raised = {} if is_same else self._raised  # after different errors, all ranks end
            case "failed", cause:
                self._record_failure(cause, rank, is_exiting=True)
            case "lost", close_reason:
                self._handle_lost_rank(rank, close_reason)

    def _handle_entry_of_leader(self, connection: ServedConnection, name: str, content: Any) -> None:
        ranks = self._connections.get(connection, [])
        if name == "gone":  # a process that left its leader while rank zero answered
            for rank in [rank for rank in ranks if self.world.peers[rank].id == content]:
                self._handle_lost_rank(rank, " (killed? out of memory?)")
            return
        for entry in content:
            match entry:
                case [int() as rank, values] if rank in ranks:
                    self._update(rank, values)

    def _update(self, rank: int, values: object) -> None:
        if rank in self._exited_ranks:
            return
        status = hangs.Status.from_message(values)
        self._hangs.update(rank, status)
        self.slow_ranks.update(rank, status.first_gradient if status else 0.0)

    def _choose_stop(self) -> None:
        """Once all positions are known, has all ranks stop at the safe point after the most advanced position."""
        is_known = len(self._positions.keys() | self._exited_ranks) == self.size and self._positions
        if self._stop_reason is not None and self._stop_at is None and is_known:
            self._stop_at = max(-1, *self._positions.values()) + 1
            self.send_all({"stop_at": self._stop_at})

    def _record_answer(self, topic: str, rank: int, is_there: bool, batch: int) -> None:
        """Asks all ranks after the first answer, and decides after the last one."""
        answers = self._answers.setdefault(topic, {})
        if not answers:
            self.send_all({"question": [topic, batch]})
        answers[rank] = is_there, batch
        self._decide(topic)

    def _decide(self, topic: str) -> None:
        """Sends the decision once all ranks have answered that have not left."""
        answers = self._answers[topic]
        if len(answers.keys() | self._exited_ranks) == self.size:
            del self._answers[topic]
            self._decisions[topic] = self._decisions.get(topic, 0) + 1
            ranks = [rank for rank in sorted(answers) if answers[rank][0]]
            last_batch = max(batch for _, batch in answers.values())
            is_unanimous = len(answers) == self.size and set(answers.values()) == {(True, last_batch)}
            self.send_all({"decision": [topic, last_batch if is_unanimous else last_batch + 1, ranks]})

    def _record_failure(self, cause: str, reporting_rank: int, is_exiting: bool) -> None:
        """Records the first failure, which ends the run, and sends it to all ranks."""
        if self._failure is None:
            self._failure = {"failed": [cause, reporting_rank, is_exiting]}
            self.send_all(self._failure)

    def send_all(self, message: Message | None) -> None:
        """Sends a message to all ranks, encoded once. Any thread may call."""
        body = encode_message(message)
        for connection in list(self._connections):
            connection.send_body(body)
