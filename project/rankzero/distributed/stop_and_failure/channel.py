"""A connection of every rank to rank zero, beside the process group. Imports no torch.

Through it all ranks agree on the step that they stop behind, and learn at once that one of them has failed, also while
their main threads wait in a collective that will never end. A step that nobody wants to stop at costs no message.
"""

import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from rankzero.distributed import network
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.error_reporter import acquire_host_lock
from rankzero.distributed.process.early_exit import LEAVE, EarlyExit
from rankzero.distributed.process.exit_handshake import report_exit
from rankzero.distributed.rendezvous.peers import Peer
from rankzero.distributed.rendezvous.server import where_to_listen
from rankzero.distributed.stop_and_failure.server import (
    BEAT_SECONDS,
    LAUNCHER_REPORTS,
    ControlServer,
    JsonLineConnection,
    Message,
    keep_alive,
)
from rankzero.distributed.stop_and_failure.watchdog import start_watchdog
from rankzero.messages import print_error

LEAVE_SECONDS = 2.0
"""Once one has failed, the main threads of the others have so long to find out by themselves."""

TEARDOWN_SECONDS = 10.0
"""And so long to leave once they have."""

ON_ABORT_SECONDS = 12.0
"""And so long for `on_abort`, and for a save that is under way."""

ANSWER_SECONDS = 3.0
CONNECT_SECONDS = 30.0


class ControlChannel:
    """This rank's end of it. All ranks must make one.

    Args:
        launch: Where this process stands.
        members: All processes, by rank.
        all_gather_object: Every rank gives a value, all get all of them.
        interface: `--interface`, whose address alone is listened on.

    Attributes:
        on_abort: Called, in another thread, before this process is ended from there.
        how_ended: Says how a rank has ended, in words behind its name, as far as that can be known; otherwise nothing.
    """

    def __init__(
        self,
        launch: Launch,
        members: Sequence[Peer],
        all_gather_object: Callable[[Any], list[Any]],
        interface: str | None = None,
    ) -> None:
        self.launch, self.members, self.rank = launch, members, launch.rank or 0
        self.on_abort: Callable[[str], None] = lambda cause: None
        self.how_ended: Callable[[int], str] = lambda rank: ""
        self._safe_points = -1
        self._stop_reason: str | None = None
        self._stop_at: int | None = None
        self._settled = threading.Event()
        self._has_failed = threading.Event()
        self._cause, self._reporting_rank = "", LAUNCHER_REPORTS
        self._leaving = self._reports_itself = self._done = False
        self._early_exit = EarlyExit(self._exit_early)
        self._server: ControlServer | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._to_server: JsonLineConnection | None = None
        if launch.world_size > 1:
            self._join(all_gather_object, interface)

    def _join(self, all_gather_object: Callable[[Any], list[Any]], interface: str | None) -> None:
        one_machine, where = self.launch.num_nodes == 1, None
        self._watched = one_machine and self.launch.launcher == "local"
        if self.rank == 0:
            listening = network.listen("127.0.0.1" if one_machine else self._address_to_listen_at(interface), 0)
            self._server = ControlServer(listening, self.members, self._watched, lambda rank: self.how_ended(rank))
            where = (*listening.getsockname()[:2], self._server.token)
        host, port, self._token = all_gather_object(where)[0]
        self._to_server = JsonLineConnection(self._connection(host, port))
        self._to_server.send({"rank": self.rank, "token": self._token})
        me = self.members[self.rank]
        here = [other for other in self.members if (other.machine, other.pids) == (me.machine, me.pids)]
        if here[0].rank == self.rank:
            self._watchdog = start_watchdog(here[0].host, [(member.rank or 0, member.pid) for member in here])
        threading.Thread(target=self._listen, args=(self._to_server,), name="control channel", daemon=True).start()

    def _connection(self, host: str, port: int) -> socket.socket:
        """Connects to the control server.

        Raises:
            OSError: It cannot be reached.
        """
        ips = [host]
        if host in ("0.0.0.0", "::"):  # of all its addresses; what they are called may differ from machine to machine
            ips = ["127.0.0.1"] if self.rank == 0 else network.resolve(self.launch.address)
        for ip in ips:
            try:
                connection = socket.create_connection((ip, port), timeout=CONNECT_SECONDS)
            except OSError:
                if ip == ips[-1]:
                    raise
                continue
            keep_alive(connection)
            return connection
        raise AssertionError("an address resolves to something, or it has been refused")

    def _address_to_listen_at(self, interface: str | None) -> str:
        own = [ip for ip in network.resolve(self.launch.address) if network.is_mine(ip)]
        return where_to_listen(self.launch, own, interface)

    # Stopping together

    def request_stop(self, reason: str) -> None:
        """Has all ranks stop at the next safe point that they can agree on. Any thread of any rank may call."""
        if self._to_server:
            self._to_server.send({"stop": reason})
        elif self._stop_reason is None:
            self._stop_reason, self._stop_at = reason, 0
            self._settled.set()
            self._announce(reason)

    def check_stop(self) -> str | None:
        """Says that this rank has come to its next safe point; returns why all stop here, or None.

        Every rank comes to the same ones. One that knows of a wish to stop waits here until all have said how far they
        are; a thread of theirs says so, so no rank has to come to a safe point for that.
        """
        self._safe_points += 1
        if self._stop_reason is None:
            return None
        while not self._settled.wait(1):
            if self._has_failed.is_set():
                time.sleep(TEARDOWN_SECONDS)  # the other thread is about to end this process
        assert self._stop_at is not None
        return self._stop_reason if self._safe_points >= self._stop_at else None

    def _announce(self, reason: str) -> None:
        """Tells a person, at once, that they have been heard."""
        where = "as soon as this step is done" if self._safe_points >= 0 else "before the first step"
        print_error(f"{reason}: stopping {where}" + "; once more to stop now" * (reason == "SIGINT"))

    # Failing together

    def report_failure(self, cause: str) -> bool:
        """Says that this rank has failed; the others are ended. Returns whether this rank is to tell a person why."""
        self._leaving = self._reports_itself = True
        if self._to_server is None:
            return True
        if not self._has_failed.is_set():
            self._to_server.send({"failed": cause})
        if not self._has_failed.wait(ANSWER_SECONDS):
            return acquire_host_lock(self._name)
        return self._reporting_rank == self.rank

    def failure_cause(self, seconds: float = 0) -> str | None:
        """Why the run is over, waited for so long; None where no other rank has failed. It has been told."""
        self._leaving = True
        if self._to_server:
            self._has_failed.wait(seconds)
        return self._cause if self._has_failed.is_set() else None

    def watch_exit(self) -> None:
        """From now on `os._exit` in a user's code is a failure that all ranks learn of."""
        self._early_exit.watch()

    def leave(self) -> None:
        """Says that this rank is done: well, or with its failure told."""
        self._early_exit.close()
        self._leaving = self._done = True
        if self._to_server:
            self._to_server.send({"leaving": True})
        if self._server:
            self._server.finish()
        if self._watchdog:
            self._watchdog.kill()
            self._watchdog.wait()

    @property
    def _name(self) -> str:
        """What the processes of a machine claim to tell that rank zero is gone, which others do alone."""
        return f"control channel {self._token}"

    # The thread

    def _listen(self, connection: JsonLineConnection) -> None:
        while (messages := connection.receive(BEAT_SECONDS)) is not None:
            for message in messages:
                self._take(message, connection)
            connection.send(None)
        if not self._done:
            cause = f"rank 0 on {self.members[0].host} {self.how_ended(0) or f'is gone{connection.why}'}"
            self._end(cause, not self._watched and acquire_host_lock(self._name))

    def _take(self, message: Message, connection: JsonLineConnection) -> None:
        if "stop_requested" in message and self._stop_reason is None:
            # The main thread counts a safe point before it looks whether somebody asks; this one does it the other way
            # round. So either the main thread sees the wish there, or the place that is told here is that very point.
            self._stop_reason = str(message["stop_requested"])
            connection.send({"position": self._safe_points})
            if self.rank == 0:
                self._announce(self._stop_reason)
        elif "stop_at" in message:
            self._stop_at = int(message["stop_at"])
            self._settled.set()
        elif "done" in message:
            self._done = True  # rank zero is, and that it goes is no failure
        elif "failed" in message:
            self._reporting_rank = int(message["by"])
            self._end(str(message["failed"]), self._reporting_rank == self.rank and not self._reports_itself)

    def _end(self, cause: str, tells: bool) -> None:
        """Has the main thread leave, since another rank has failed; ends this process where it does not."""
        self._cause = cause
        self._has_failed.set()
        if tells:
            print_error(f"{cause}; ending all")
        deadline = time.monotonic() + LEAVE_SECONDS
        while time.monotonic() < deadline and not self._leaving:
            time.sleep(0.05)
        if self._leaving:
            time.sleep(TEARDOWN_SECONDS)
        if self._reports_itself and self._reporting_rank == self.rank and not self._done:
            print_error(f"{cause}; ending all")  # it has not come to that
        self._call_on_abort(f"{cause}; the main thread was at\n{_stack_of_main()}")
        report_exit()
        LEAVE(1)

    def _exit_early(self, status: int) -> None:
        """The code that is trained has called `os._exit`."""
        alone = self._to_server is None
        who = "this process" if alone else f"rank {self.rank} on {socket.gethostname()}"
        cause = f"{who} ended with exit code {status} (os._exit) without a report"
        if self.report_failure(cause):
            print_error(cause + "; ending all" * (not alone))
        self._call_on_abort(f"{cause}\n{''.join(traceback.format_stack())}")
        report_exit()

    def _call_on_abort(self, words: str) -> None:
        last = threading.Thread(target=self.on_abort, args=(words,), daemon=True)  # which may wait for the disk
        last.start()
        last.join(ON_ABORT_SECONDS)


def _stack_of_main() -> str:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame)) if frame else ""
