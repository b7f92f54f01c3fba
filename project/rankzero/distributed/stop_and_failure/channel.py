"""The control channel: connects every rank to rank zero, in addition to the process group. Does not import torch.

Through the control channel, all ranks agree on the step to stop after. They also learn at once that another rank has
failed, even while their main threads wait in a collective that will never finish. A step without a stop request costs
no message.
"""

import hmac
import socket
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from rankzero.distributed import network
from rankzero.distributed.connections.line_connection import LineConnection, Message
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.monitoring.heartbeat import HEARTBEAT_SECONDS
from rankzero.distributed.monitoring.monitor import Monitor, call_in_thread, print_hang
from rankzero.distributed.monitoring.stacks import main_thread_stack
from rankzero.distributed.process.early_exit import ORIGINAL_EXIT, EarlyExit
from rankzero.distributed.process.exit_handshake import report_exit
from rankzero.distributed.rendezvous.listening import listening_address
from rankzero.distributed.rendezvous.peers import Peer
from rankzero.distributed.stop_and_failure.connect import connect_to_control_server
from rankzero.distributed.stop_and_failure.error_reporter import acquire_host_lock
from rankzero.distributed.stop_and_failure.server import LAUNCHER_REPORTS, ControlServer
from rankzero.distributed.stop_and_failure.watchdog import start_watchdog
from rankzero.messages import print_error

NOTICE_SECONDS = 2.0
"""After one rank has failed, how long the main threads of the other ranks have to notice the failure themselves."""

TEARDOWN_SECONDS = 10.0
"""How long a main thread that has noticed the failure has to exit."""

ANSWER_SECONDS = 3.0


class ControlChannel:
    """This rank's end of the control channel. All ranks must create one.

    Args:
        launch: The position of this process among all processes.
        members: All processes, by rank.
        broadcast_object: Returns rank zero's value on all ranks.
        interface: `--interface`; if given, rank zero listens only on the address of this interface.
        secret: The key that all ranks know; None if they do not share one.

    Attributes:
        monitor: Reports what the main thread is doing, and acts on a hang.
        on_stop: Called on rank zero in a separate thread when a stop is requested, before the step ends.
        on_abort: Called with the cause, in a separate thread, before this process is terminated after a failure.
        describe_exit: Describes how a rank ended, as text that follows the rank's name; empty if that is unknown.
    """

    def __init__(
        self,
        launch: Launch,
        members: Sequence[Peer],
        broadcast_object: Callable[[Any], Any],
        interface: str | None = None,
        secret: bytes | None = None,
    ) -> None:
        self._secret, self._lock_name = secret, ""
        self.launch, self.members, self.rank = launch, members, launch.rank or 0
        self.monitor = Monitor(lambda cause: self._terminate(cause, True))
        self.on_stop: Callable[[], None] = lambda: None
        self.on_abort: Callable[[str], None] = lambda cause: None
        self.describe_exit: Callable[[int], str] = lambda rank: ""
        self._position, self._silences = -1, 0
        self._stop_reason: str | None = None
        self._stop_at: int | None = None
        self._stop_decided = threading.Event()
        self._failure_received = threading.Event()
        self._cause, self._reporting_rank = "", LAUNCHER_REPORTS
        self._is_exiting = self._has_reported_failure = self._is_finished = False
        self._early_exit = EarlyExit(self._exit_early)
        self._server: ControlServer | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._server_connection: LineConnection | None = None
        if launch.world_size > 1:
            self._connect_all_ranks(broadcast_object, interface)
        else:
            self.monitor.is_single_process = True

    def _connect_all_ranks(self, broadcast_object: Callable[[Any], Any], interface: str | None) -> None:
        is_single_machine, endpoint = self.launch.num_nodes == 1, None
        self._parent_reports_lost_ranks = is_single_machine and self.launch.launcher == "local"
        if self.rank == 0:
            listener = network.listen("127.0.0.1" if is_single_machine else self._server_address(interface), 0)
            self._server = ControlServer(
                listener,
                self.members,
                self._parent_reports_lost_ranks,
                lambda rank: self.describe_exit(rank),
                self.launch.world_id,
                self._secret,
            )
            self._server.on_hang = self.monitor.ends_run
            self.monitor.slow_ranks = self._server.slow_ranks.reports
            endpoint = listener.getsockname()[:2]
        host, port = broadcast_object(endpoint)
        # Unpredictable for other users of this machine, who could otherwise acquire the lock.
        lock_name = f"control channel {self.launch.world_id} {port}".encode()
        self._lock_name = hmac.digest(self._secret or b"no key", lock_name, "sha256").hex()
        self._server_connection = connect_to_control_server(self.launch, host, port, self._secret)
        self._server_connection.send({"rank": self.rank})
        this_peer = self.members[self.rank]
        local_members = [
            member for member in self.members if (member.machine, member.pids) == (this_peer.machine, this_peer.pids)
        ]
        if local_members[0].rank == self.rank:
            self._watchdog = start_watchdog(
                local_members[0].host, [(member.rank or 0, member.pid) for member in local_members]
            )
        threading.Thread(
            target=self._receive_messages, args=(self._server_connection,), name="control channel", daemon=True
        ).start()

    def _server_address(self, interface: str | None) -> str:
        own_addresses = [ip for ip in network.resolve(self.launch.address) if network.is_local_address(ip)]
        return listening_address(self.launch, own_addresses, interface)

    # Stops

    def request_stop(self, reason: str) -> None:
        """Stops all ranks at the next safe point that they can agree on. Any thread of any rank may call."""
        if self._server_connection:
            self._server_connection.send({"stop": reason})
        elif self._stop_reason is None:
            self._stop_reason, self._stop_at = reason, 0
            self._stop_decided.set()
            self._confirm_stop(reason)

    def check_stop(self) -> str | None:
        """Counts a safe point that this rank has reached; returns the reason if all ranks stop here, else None.

        All ranks reach the same safe points. A rank that has received a stop request waits here until all ranks have
        reported their positions. The receiving thread of each rank reports the position, so that no rank has to reach a
        safe point first.
        """
        self._position += 1
        if self._stop_reason is None:
            return None
        while not self._stop_decided.wait(1):
            if self._failure_received.is_set():
                time.sleep(TEARDOWN_SECONDS)  # the receiving thread is about to terminate this process
        assert self._stop_at is not None
        return self._stop_reason if self._position >= self._stop_at else None

    def _confirm_stop(self, reason: str) -> None:
        """Confirms the stop request to the user at once, and lets rank zero save what it holds in memory."""
        stop_point = "after this step" if self._position >= 0 else "before the first step"
        print_error(f"{reason}: stopping {stop_point}" + "; send it again to stop immediately" * (reason == "SIGINT"))
        threading.Thread(target=self.on_stop, name="on stop", daemon=True).start()

    # Failures

    def report_failure(self, cause: str) -> bool:
        """Reports this rank's failure, so that all ranks exit; returns whether this rank has to print the cause."""
        self._is_exiting = self._has_reported_failure = True
        if self._server_connection is None:
            return True
        if not self._failure_received.is_set():
            self._server_connection.send({"failed": cause})
        if not self._failure_received.wait(ANSWER_SECONDS):
            return acquire_host_lock(self._lock_name)
        return self._reporting_rank == self.rank

    def failure_cause(self, seconds: float = 0) -> str | None:
        """Waits up to `seconds` for a failure and returns its cause, which has been printed; None without a failure."""
        self._is_exiting = True
        if self._server_connection:
            self._failure_received.wait(seconds)
        return self._cause if self._failure_received.is_set() else None

    def watch_for_early_exit(self) -> None:
        """From this call on, reports `os._exit` in the user's code to all ranks as a failure."""
        self._early_exit.install()

    def close(self) -> None:
        """Announces that this rank exits, after success or after a failure that has been reported."""
        self._early_exit.close()
        self._is_exiting = self._is_finished = True
        if self._server_connection:
            self._server_connection.send({"leaving": True})
        if self._server:
            self._server.finish()
        if self._watchdog:
            self._watchdog.kill()
            self._watchdog.wait()

    # The receiving thread

    def _receive_messages(self, connection: LineConnection) -> None:
        while (messages := connection.receive(HEARTBEAT_SECONDS)) is not None:
            for message in messages:
                self._handle_message(message, connection)
            connection.send(self.monitor.message())
            if silence := self.monitor.new_silence(bool(messages)):
                self._handle_hang(f"rank 0 on {self.members[0].host} {silence}")
        if not self._is_finished:
            self._handle_loss(self.describe_exit(0) or f"was lost{connection.close_reason}")

    def _handle_message(self, message: Message, connection: LineConnection) -> None:
        if "stop_requested" in message and self._stop_reason is None:
            # The main thread first counts a safe point, then reads the stop reason. This thread first sets the stop
            # reason, then reads the count. So no safe point is missed: either the main thread sees the request at this
            # safe point, or the position sent here includes it.
            self._stop_reason = str(message["stop_requested"])
            connection.send({"position": self._position})
            if self.rank == 0:
                self._confirm_stop(self._stop_reason)
        elif "stop_at" in message:
            self._stop_at = int(message["stop_at"])
            self._stop_decided.set()
        elif "hang" in message:
            self.monitor.record(str(message["hang"]))
        elif "rank_zero" in message:
            self.monitor.rank_zero_place = str(message["rank_zero"])
        elif "done" in message:
            self._is_finished = True  # rank zero has finished; its exit is not a failure
        elif "failed" in message:
            self._reporting_rank = int(message["by"])
            self._terminate(
                str(message["failed"]), self._reporting_rank == self.rank and not self._has_reported_failure
            )

    def _handle_loss(self, description: str) -> None:
        """Handles the loss of rank zero. One rank per machine reports it, unless the parent process does."""
        name, place = f"rank 0 on {self.members[0].host}", self.monitor.rank_zero_place
        cause = f"{name} {description}" + (f", last seen in {place}" if place else "")
        if self._parent_reports_lost_ranks:
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

    def _terminate(self, cause: str, prints_cause: bool) -> None:
        """Waits for the main thread to exit after a failure, and terminates this process if it does not."""
        self._cause = cause
        self._failure_received.set()
        if prints_cause:
            print_error(cause + "; stopping all ranks" * (self.launch.world_size > 1))
        deadline = time.monotonic() + NOTICE_SECONDS
        while time.monotonic() < deadline and not self._is_exiting:
            time.sleep(0.05)
        if self._is_exiting:
            time.sleep(TEARDOWN_SECONDS)
        if self._has_reported_failure and self._reporting_rank == self.rank and not self._is_finished:
            print_error(f"{cause}; stopping all ranks")  # the main thread has not printed it
        stack = "" if cause == self.monitor.recorded else f"; the main thread was at\n{main_thread_stack()}"
        call_in_thread(self.on_abort, f"{cause}{stack}")
        report_exit()
        ORIGINAL_EXIT(1)

    def _exit_early(self, status: int) -> None:
        """Reports that the user's code has called `os._exit`."""
        is_single_process = self._server_connection is None
        process_name = "this process" if is_single_process else f"rank {self.rank} on {socket.gethostname()}"
        cause = f"{process_name} exited with code {status} (os._exit) without an error report"
        if self.report_failure(cause):
            print_error(cause + "; stopping all ranks" * (not is_single_process))
        call_in_thread(self.on_abort, f"{cause}\n{''.join(traceback.format_stack())}")
        report_exit()
