"""The control channel: connects every rank to rank zero, in addition to the process group.

It uses the connections of the rendezvous; the leader of each node connects the ranks of the node to rank zero.

Through the control channel, all ranks exchange values before training and agree on the step to stop after. They also
learn at once that another rank has failed, even while their main threads wait in a collective that will never finish. A
step without a stop request costs no message.
"""

import socket
import subprocess
import threading
import time
import traceback
from collections.abc import Callable
from hashlib import sha256
from typing import Any

from rankzero.distributed.connections.line_connection import LineConnection, Message
from rankzero.distributed.monitoring.hangs import ReportSchedule, report_interval
from rankzero.distributed.monitoring.monitor import Monitor, call_in_thread, print_hang
from rankzero.distributed.monitoring.stacks import main_thread_stack
from rankzero.distributed.process.exit_reports import ORIGINAL_EXIT, EarlyExit, report_exit
from rankzero.distributed.stop_and_failure.agreement import TOPICS, Agreement
from rankzero.distributed.stop_and_failure.error_reporter import acquire_host_lock
from rankzero.distributed.stop_and_failure.exchange import Exchange
from rankzero.distributed.stop_and_failure.leader import Link, NodeLeader
from rankzero.distributed.stop_and_failure.protocol import CAUSE, FROM_SERVER, read
from rankzero.distributed.stop_and_failure.server import PARENT_REPORTS, ControlServer
from rankzero.distributed.stop_and_failure.watchdog import start_watchdog
from rankzero.distributed.timers import TIMERS
from rankzero.distributed.world import World
from rankzero.messages import AnotherRankFailed, RunError, print_error

CAUGHT_ADVICE = "a script can catch an error only if all ranks raise it, in the same line and not in the backward pass"


class ControlChannel:
    """This rank's end of the control channel. All ranks must create one.

    Args:
        world: The known processes; on rank zero all.
        link: The connections of this process; None in a single process.

    Attributes:
        exchange: Lets rank zero decide on values of all ranks.
        position: Number of the newest safe point that this rank has reached, from 0; -1 before the first one. The main
            thread increments it, then reads `stop_reason`.
        stop_reason: Why all ranks stop at a safe point; None without a request.
        agreements: Topic -> agreement of all ranks; only with several processes.
        monitor: Reports what the main thread is doing, and acts on a hang.
        on_stop: Called on rank zero in a separate thread when a stop is requested, before the step ends.
        on_abort: Called with the cause, in a separate thread, before this process is terminated after a failure.
        describe_exit: Describes how a rank ended, as text that follows the rank's name; empty if that is unknown.
    """

    def __init__(self, world: World, link: Link | None) -> None:
        self.world, self.rank = world, world.rank
        self._lock_name = f"run {world.peers[0].id}" if link else ""
        self.monitor = Monitor(lambda cause: self._terminate(cause, True))
        self.on_stop: Callable[[], None] = lambda: None
        self.on_abort: Callable[[str], None] = lambda cause: None
        self.describe_exit: Callable[[int], str] = lambda rank: ""
        self.position, self._silences = -1, 0
        self.stop_reason: str | None = None
        self._stop_at: int | None = None
        self._stop_decided = threading.Event()
        self._failure_received = threading.Event()
        self._cause, self._reporting_rank = "", PARENT_REPORTS
        self._is_exiting = self._has_reported_failure = self._is_finished = self._is_same_error = False
        self._early_exit = EarlyExit(self._exit_early)
        self._errors_compared = threading.Event()
        self.agreements = {topic: Agreement(topic, self._send, self._check_failure) for topic in TOPICS}
        self.exchange = Exchange(world, self._send, self._send_all, self._raise_failure)
        self._refusals: dict[str, str] = {}
        self._refusals_received = threading.Event()
        self._server: ControlServer | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._connection: LineConnection | None = None
        self._node_leader: NodeLeader | None = None
        self.monitor.is_single_process = link is None
        if link is not None:
            self._use(link)

    def _use(self, link: Link) -> None:
        world, self._connection = self.world, link.connection
        self._connection.connection.settimeout(TIMERS.send)
        if self.rank == 0 and link.server:
            exchange, describe_exit = self.exchange, lambda rank: self.describe_exit(rank)
            self._server = ControlServer(link.server, link.ranks, world, exchange, describe_exit)
            self._server.on_hang = self.monitor.ends_run
            self.monitor.slow_ranks = self._server.slow_ranks.reports
        elif link.node_leader:
            self._node_leader = link.node_leader
            self._node_leader.start()
        peers, own = world.peers, world.peers[self.rank]
        pids = {rank: peer.pid for rank, peer in peers.items() if (peer.machine, peer.pids) == (own.machine, own.pids)}
        if min(pids) == self.rank:  # the first rank of this machine
            self._watchdog = start_watchdog(own.host, pids, TIMERS.suspended, TIMERS.slow_poll)
        self._receiver = threading.Thread(
            target=self._receive_messages, args=(self._connection, link.leader), name="control channel", daemon=True
        )
        self._receiver.start()

    def _send(self, message: Message) -> None:
        """Sends a message with this rank's number; does nothing in a single process."""
        if self._connection:
            self._connection.send({"rank": self.rank, **message})

    def _send_all(self, message: Message) -> None:
        """Sends a message of rank zero to all ranks; does nothing in a single process."""
        if self._server:
            self._server.send_all(message)
            self._send({})  # wakes the server, so that it sends what a connection has not accepted at once

    # Stops

    def request_stop(self, reason: str) -> None:
        """Stops all ranks at the next safe point that they can agree on. Any thread of any rank may call."""
        if self._connection:
            self._send({"stop": reason})
        elif self.stop_reason is None:
            self.stop_reason, self._stop_at = reason, 0
            self._stop_decided.set()
            self._confirm_stop(reason)

    def wait_for_stop_position(self) -> bool:
        """Returns whether all ranks stop at this position, after all have reported theirs; only after a stop request.

        All ranks reach the same safe points. The receiving thread of each rank reports the position, so that no rank
        has to reach a safe point first.
        """
        while not self._stop_decided.wait(TIMERS.slow_poll):
            self._check_failure()
        assert self._stop_at is not None
        return self.position >= self._stop_at

    def _check_failure(self) -> None:
        if self._failure_received.is_set():
            time.sleep(TIMERS.teardown)  # the receiving thread is about to terminate this process

    def _raise_failure(self) -> None:
        if self._failure_received.is_set():
            if self._has_reported_failure and self._reporting_rank == self.rank:
                raise RunError(f"{self._cause.partition(' failed: ')[2]}: {CAUGHT_ADVICE}")
            raise AnotherRankFailed(self._cause)

    def forget_stop(self) -> None:
        """Makes a request to stop that has been served apply to no later run; only in a single process."""
        self.stop_reason = self._stop_at = None
        self._stop_decided.clear()

    def _confirm_stop(self, reason: str) -> None:
        """Confirms the stop request to the user at once, and lets rank zero save what it holds in memory."""
        stop_point = "after this step" if self.position >= 0 else "before the first step"
        print_error(f"{reason}: stopping {stop_point}" + "; send it again to stop immediately" * (reason == "SIGINT"))
        threading.Thread(target=self.on_stop, name="on stop", daemon=True).start()

    # Failures

    def is_same_on_all_ranks(self, error: str, seconds: float) -> bool:
        """Returns whether all ranks have raised the same error at the same point, so that none waits for another.

        Args:
            error: Describes the error and where this rank is.
            seconds: How long to wait for the other ranks.
        """
        self._errors_compared.clear()
        self._is_same_error = self._connection is None
        self._send({"raised": sha256(repr([error, self.position, self.exchange.count]).encode()).hexdigest()})
        deadline = time.monotonic() + seconds
        while self._connection and not self._errors_compared.wait(TIMERS.poll):
            if self._failure_received.is_set() or time.monotonic() > deadline:
                return False
        return self._is_same_error

    def report_failure(self, cause: str) -> bool:
        """Reports this rank's failure, so that all ranks exit; returns whether this rank has to print the cause."""
        self._is_exiting = self._has_reported_failure = True
        if self._connection is None:
            return True
        if not self._failure_received.is_set():
            self._send({"failed": cause[: CAUSE.limit]})
        if not self._failure_received.wait(TIMERS.cause):
            return acquire_host_lock(self._lock_name)
        return self._reporting_rank == self.rank

    def failure_cause(self, seconds: float = 0) -> str | None:
        """Waits up to `seconds` for a failure and returns its cause, which some rank prints; None without a failure.

        From this call on, the main thread counts as exiting.
        """
        self._is_exiting = True
        if self._connection:
            self._failure_received.wait(seconds)
        return self._cause if self._failure_received.is_set() else None

    def refusals(self, digest: str = "") -> dict[str, str]:
        """Announces a refusal of this rank; returns digest -> name of the first rank with this refusal, of all ranks.

        The announced refusal is not in the result if rank zero does not answer within `TIMERS.cause`, or has sent a
        failure, after which this process receives nothing.

        Args:
            digest: Digest of the text of this rank's refusal; empty to announce none.
        """
        if self._connection is None:
            return {digest: self.world.name_of(self.rank)} if digest else {}
        self._refusals_received.clear()
        self._send({"refusal": digest})
        deadline = time.monotonic() + TIMERS.cause
        while not self._refusals_received.wait(TIMERS.poll):
            if self._failure_received.is_set() or not self._receiver.is_alive() or time.monotonic() > deadline:
                break
        return self._refusals

    def watch_for_early_exit(self) -> None:
        """From this call on, reports `os._exit` in the user's code to all ranks as a failure."""
        self._early_exit.install()

    def close(self) -> None:
        """Announces that this rank exits, after success or after a failure that has been reported.

        Rank zero and the leaders wait for the ranks that need their connections; not after a failure that all ranks
        know of, because a rank may wait in a collective until this process has ended.
        """
        self._early_exit.close()
        self._is_exiting = self._is_finished = True
        if served := self._server or self._node_leader:
            served.finish(TIMERS.poll if self._failure_received.is_set() else TIMERS.leave)
        self._send({"leaving": True})
        if served:
            served.thread.join(TIMERS.leave + TIMERS.slow_poll)
        if self._watchdog:
            self._watchdog.kill()
            self._watchdog.wait()

    # The receiving thread

    def _receive_messages(self, connection: LineConnection, leader: int) -> None:
        schedule, interval = ReportSchedule(), report_interval(self.world.nodes)
        heard_leader_at = time.monotonic()
        while (messages := connection.receive(TIMERS.heartbeat)) is not None:
            if messages:
                heard_leader_at = time.monotonic()
            for message in messages:
                for name, content in read(message, FROM_SERVER):
                    self._handle_entry(name, content)
            has_leader = leader != 0  # which decides what to pass on; also in the leader itself
            is_requested = any("rank_zero" in message for message in messages)
            if schedule.is_due(status := self.monitor.status(), is_requested or has_leader):
                self._send({"status": status})
            is_leader_silent = has_leader and time.monotonic() - heard_leader_at > TIMERS.silence
            # A leader sends empty messages of its own. If it is silent, rank zero reports that.
            silence = self.monitor.new_silence(any(messages), interval)
            if silence and not is_leader_silent:
                self._handle_hang(f"{self.world.name_of(0)} {silence}")
        if not self._is_finished and leader == 0:
            self._handle_lost_rank_zero(self.describe_exit(0) or f"was lost{connection.close_reason}")
        elif not self._is_finished:  # rank zero reports it
            self._terminate(f"{self.world.name_of(leader)} was lost{connection.close_reason}", False)

    def _handle_entry(self, name: str, content: Any) -> None:
        match name, content:
            case "stop_requested", reason if self.stop_reason is None:
                # The main thread first counts a safe point, then reads the stop reason. This thread first sets the stop
                # reason, then reads the count. So no safe point is missed: either the main thread sees the request at
                # this safe point, or the position sent here includes it.
                self.stop_reason = reason
                self._send({"position": self.position})
                if self.rank == 0:
                    self._confirm_stop(reason)
            case "stop_at", position:
                self._stop_at = position
                self._stop_decided.set()
            case "question", [topic, batch]:
                self.agreements[topic].handle_question(batch)
            case "decision", [topic, batch, ranks]:
                self.agreements[topic].handle_decision(batch, ranks)
            case "gathering", number:
                self.exchange.wait_longer(number)
            case "decided", [number, outcome]:
                self.exchange.receive(number, outcome)
            case "refusals", [refusals, asking_rank]:
                self._refusals = refusals
                if asking_rank == self.rank:
                    self._refusals_received.set()
            case "same_error", is_same:
                self._is_same_error = is_same
                self._errors_compared.set()
            case "hang", description:
                self.monitor.record(description)
            case "rank_zero", place:
                self.monitor.rank_zero_place = place
            case "done", True:  # rank zero, or the leader of this node, has finished; its exit is not a failure
                self._is_finished = True
                self.exchange.leave(0)
            case "rank_zero_lost", close_reason if not self._is_finished:
                self._handle_lost_rank_zero(self.describe_exit(0) or f"was lost{close_reason}")
            case "failed", [cause, reporting_rank, is_exiting]:
                self._reporting_rank = reporting_rank
                self._terminate(cause, reporting_rank == self.rank and not self._has_reported_failure, is_exiting)

    def _handle_lost_rank_zero(self, description: str) -> None:
        """Handles the loss of rank zero. One rank per machine reports it, unless the parent process does."""
        name, place = self.world.name_of(0), self.monitor.rank_zero_place
        cause = f"{name} {description}" + (f", last seen in {place}" if place else "")
        if self.world.parent_reports_lost_ranks:
            if place and acquire_host_lock(self._lock_name):
                print_error(f"{name} was last seen in {place}")
            self._terminate(cause, False)
        else:
            self._terminate(cause, acquire_host_lock(self._lock_name))

    def _handle_hang(self, description: str) -> None:
        """Handles a hang of rank zero, which cannot notice it."""
        self.monitor.record(description)
        self._silences += 1
        is_reporting = acquire_host_lock(f"{self._lock_name} silence {self._silences}")
        if self.monitor.stops_run:
            self._terminate(description, is_reporting)
        elif is_reporting:
            print_hang(description)

    def _terminate(self, cause: str, prints_cause: bool, is_exiting: bool = False) -> None:
        """Waits for the main thread to exit after a failure, then exits with code 1. Does not return.

        `is_exiting` states whether the failed rank exits by itself, which may end a collective that waits for it.
        """
        self._cause = cause
        self._failure_received.set()
        if prints_cause:
            print_error(cause + "; stopping all ranks" * (self.world.size > 1))
        deadline = time.monotonic() + (TIMERS.teardown if is_exiting else TIMERS.notice)
        while time.monotonic() < deadline and not self._is_exiting:
            time.sleep(TIMERS.poll)
        if self._is_exiting:
            time.sleep(TIMERS.teardown)
        if self._has_reported_failure and self._reporting_rank == self.rank and not self._is_finished:
            print_error(f"{cause}; stopping all ranks")  # the main thread has not printed it
        stack = "" if cause == self.monitor.recorded else f"; the main thread was at\n{main_thread_stack()}"
        call_in_thread(self.on_abort, f"{cause}{stack}")
        report_exit()
        ORIGINAL_EXIT(1)

    def _exit_early(self, status: int) -> None:
        process_name = f"rank {self.rank} on {socket.gethostname()}" if self._connection else "this process"
        cause = f"{process_name} exited with code {status} (os._exit) without an error report"
        if self.report_failure(cause):
            print_error(cause + "; stopping all ranks" * bool(self._connection))
        call_in_thread(self.on_abort, f"{cause}\n{''.join(traceback.format_stack())}")
        report_exit()
