"""Rank zero's side of the rendezvous, to which all other processes connect. Does not import torch."""

import contextlib
import errno
import json
import os
import selectors
import socket
import time
from collections.abc import Callable, Sequence

from rankzero.distributed import network
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.process.stop_signals import SIGNALS
from rankzero.distributed.rendezvous.errors import GREETING, missing, missing_ranks, not_rank_zeros
from rankzero.distributed.rendezvous.peers import Peer
from rankzero.messages import RequestError, print_error

LONGEST_LINE = 1 << 20
"""Bytes; a client that sends more without an end of line is an unrelated program."""

PROGRESS_SECONDS = 10.0
TURN_AWAY_SECONDS = 1.0
LINGER_SECONDS = 5.0
_POLL_SECONDS = 0.1


class RendezvousServer:
    """Accepts connections on rank zero until all processes have connected."""

    def __init__(self, launch: Launch, me: Peer, listening: socket.socket, deadline: float, timeout: float) -> None:
        self.launch, self.listening, self.deadline, self.timeout = launch, listening, deadline, timeout
        self.me = me
        self.admitted: dict[socket.socket, Peer] = {}
        self.callers: dict[socket.socket, bytes] = {}
        self.selector = selectors.DefaultSelector()
        self.selector.register(listening, selectors.EVENT_READ)
        listening.setblocking(False)

    @property
    def members(self) -> list[Peer]:
        """The processes that have connected, and this one."""
        return [self.me, *self.admitted.values()]

    def wait(self, refusal: RequestError | None = None) -> list[Peer]:
        """Waits for all processes, sends each of them the list of all, and returns that list.

        Args:
            refusal: Error to send instead, to all processes that connect before the deadline.

        Raises:
            RequestError: A process is missing or conflicts with another, or `refusal` is given. All processes raise it.
        """
        progress = Progress(self.timeout)
        try:
            while len(self.members) < self.launch.world_size:
                if time.monotonic() > self.deadline:
                    raise refusal or missing(self.launch, self.members, self.timeout)
                progress.print_if_due(
                    lambda: f"{missing_ranks(self.launch, self.members)}; {len(self.members)} are here"
                )
                SIGNALS.leave_if_requested()
                for key, _ in self.selector.select(_POLL_SECONDS):
                    self._serve(key.fileobj)  # type: ignore[arg-type]
            if refusal:
                raise refusal
        except RequestError as error:
            self._answer({"refused": [error.asked, error.found, error.instead]})
            raise
        members = self.members
        self._answer({"members": [member._asdict() for member in members]})
        return members

    def _serve(self, ready: socket.socket) -> None:
        if ready is self.listening:
            try:
                caller, _ = self.listening.accept()
                caller.settimeout(2)
                caller.sendall(f"{GREETING} {json.dumps(self.launch.world_id)}\n".encode())
            except OSError:
                return
            self.callers[caller] = b""
            self.selector.register(caller, selectors.EVENT_READ)
            return
        try:
            received = ready.recv(1 << 16)
        except OSError:
            received = b""
        self.callers[ready] += received
        expected = ready not in self.admitted and len(self.members) < self.launch.world_size
        if not received or len(self.callers[ready]) > LONGEST_LINE:
            self._drop(ready)
        elif expected and (member := _read_member(self.callers[ready])):
            self._admit(ready, member)

    def _admit(self, caller: socket.socket, member: Peer) -> None:
        self.admitted[caller] = member
        if member.world_size != self.launch.world_size:
            raise RequestError(
                f"a world of {self.launch.world_size} (rank 0 on {self.me.host})",
                f"rank {member.rank} on {member.host} was told of {member.world_size}",
                "the same line, with the same --nodes and --devices or WORLD_SIZE, on every machine",
            )
        for other in self.members:
            if other is not member and other.rank is not None and other.rank == member.rank:
                raise RequestError(
                    f"one process of rank {member.rank}",
                    f"two: process {other.pid} on {other.host} and process {member.pid} on {member.host}",
                    "another --node_rank (or RANK) on each",
                )

    def _drop(self, caller: socket.socket) -> None:
        self.selector.unregister(caller)
        del self.callers[caller]
        self.admitted.pop(caller, None)
        caller.close()

    def _answer(self, answer: object) -> None:
        """Answers all clients and disconnects them; the listening socket stays open unless the answer is a refusal."""
        too_many = {"refused": [f"a world of {self.launch.world_size}", "more processes than that", "fewer of them"]}
        for caller in list(self.callers):
            with contextlib.suppress(OSError):  # the client has exited; its launcher reports that
                caller.sendall((json.dumps(answer if caller in self.admitted else too_many) + "\n").encode())
            self._drop(caller)
        self.selector.close()
        if isinstance(answer, dict) and "refused" in answer:
            self.listening.close()


def _read_member(received: bytes) -> Peer | None:
    """Parses the description of a process; None if the line is incomplete or not such a description."""
    line, newline, _ = received.partition(b"\n")
    try:
        return Peer(**json.loads(line)) if newline else None
    except (ValueError, TypeError, RecursionError):
        return None


def listen_for_ranks(launch: Launch, interface: str | None) -> socket.socket | None:
    """Returns rank zero's socket; None if the port is in use, for example by a process of this world.

    If the result is None, the caller connects to the port instead.

    Raises:
        RequestError: The address is not this machine's, or this process may not listen on the port.
    """
    if launch.listening is not None:
        return socket.socket(fileno=launch.listening)
    ips = network.resolve(launch.address)
    own = [ip for ip in ips if network.is_mine(ip)]
    try:
        listening = network.listen(where_to_listen(launch, own, interface), launch.port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise RequestError(
            f"to listen on port {launch.port} of {socket.gethostname()}",
            str(error.strerror),
            "--master_port PORT (or MASTER_PORT=PORT), 1024 or more, the same for all",
        ) from None
    if not own and not _reaches_itself(ips, launch.port, listening):
        refusal = not_rank_zeros(launch, ips)
        if launch.hosts:  # the other ranks try this host next, see rankzero.distributed.rendezvous.client
            with contextlib.suppress(RequestError):
                RendezvousServer(launch, Peer.this(launch), listening, time.monotonic() + LINGER_SECONDS, 0).wait(
                    refusal
                )
        listening.close()
        raise refusal
    return listening


def where_to_listen(launch: Launch, own: Sequence[str], interface: str | None) -> str:
    """Returns the address to listen on; all addresses (`""`) if it is unknown which one the other ranks use."""
    interface = interface or network.interface_by_variable()
    if interface:
        return network.address_of(interface)
    beyond = [ip for ip in own if not network.is_loopback(ip)]
    if launch.launcher == "pbs" and not launch.one_machine:
        return ""  # the address is rank zero's own host name here, and its name in the node file elsewhere
    if own and not beyond and (launch.one_machine or launch.address in ("localhost", *own)):
        return own[0]
    # A host name that resolves to loopback here (127.0.1.1 on Debian) resolves to another address on other machines.
    return beyond[0] if len(beyond) == 1 == len(own) else ""


def _reaches_itself(ips: Sequence[str], port: int, listening: socket.socket) -> bool:
    """Whether connections to a foreign address arrive at this socket, as in a container with a published port."""
    word = os.urandom(16)
    for ip in ips:
        try:
            with socket.create_connection((ip, port), timeout=3) as sent:
                sent.sendall(word)
                listening.settimeout(1)
                while True:  # other ranks may already connect; they will retry
                    received, _ = listening.accept()
                    with received:
                        received.settimeout(1)
                        if received.recv(len(word)) == word:
                            return True
        except OSError:
            continue
    return False


def reject_callers(launch: Launch, ips: Sequence[str], error: RequestError) -> None:
    """Sends `error` to processes that connect to this machine instead of rank zero's, for `TURN_AWAY_SECONDS`."""
    with contextlib.suppress(OSError), network.listen(ips[0], launch.port) as listening:
        server = RendezvousServer(
            launch, Peer.this(launch), listening, time.monotonic() + TURN_AWAY_SECONDS, TURN_AWAY_SECONDS
        )
        with contextlib.suppress(RequestError):
            server.wait(refusal=error)


class Progress:
    """Reports at intervals which processes or ranks a process is waiting for."""

    def __init__(self, timeout: float) -> None:
        self.began = self.printed_at = time.monotonic()
        self.timeout = timeout

    def print_if_due(self, what: Callable[[], str]) -> None:
        """Prints a line if `PROGRESS_SECONDS` have passed since the last one; `what` returns its text."""
        now = time.monotonic()
        if now - self.printed_at > PROGRESS_SECONDS:
            self.printed_at = now
            left = self.began + self.timeout - now
            print_error(f"waiting: {what()}; leaving in {left:.0f} s")
