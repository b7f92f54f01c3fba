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
from rankzero.distributed.rendezvous.errors import (
    GREETING,
    describe_missing_ranks,
    missing_processes_error,
    wrong_address_error,
)
from rankzero.distributed.rendezvous.peers import Peer
from rankzero.messages import RequestError, print_error

MAX_LINE_BYTES = 1 << 20
"""Bytes; a client that sends more without an end of line is an unrelated program."""

PROGRESS_SECONDS = 10.0
REJECT_SECONDS = 1.0
"""How long a machine whose address was given by mistake rejects the ranks that connect to it."""

WRONG_ADDRESS_SECONDS = 5.0
"""How long rank zero, at an address that is not the given one, answers with the error."""

_POLL_SECONDS = 0.1


class RendezvousServer:
    """Accepts connections on rank zero until all processes have connected."""

    def __init__(
        self, launch: Launch, this_peer: Peer, listener: socket.socket, deadline: float, timeout: float
    ) -> None:
        self.launch, self.listener, self.deadline, self.timeout = launch, listener, deadline, timeout
        self.this_peer = this_peer
        self.admitted: dict[socket.socket, Peer] = {}
        self.clients: dict[socket.socket, bytes] = {}
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ)
        listener.setblocking(False)

    @property
    def members(self) -> list[Peer]:
        """The processes that have connected, and this one."""
        return [self.this_peer, *self.admitted.values()]

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
                    raise refusal or missing_processes_error(self.launch, self.members, self.timeout)
                progress.print_if_due(
                    lambda: f"{describe_missing_ranks(self.launch, self.members)}; {len(self.members)} connected"
                )
                SIGNALS.check_stop_request()
                for key, _ in self.selector.select(_POLL_SECONDS):
                    self._serve(key.fileobj)  # type: ignore[arg-type]
            if refusal:
                raise refusal
        except RequestError as error:
            self._answer_clients({"refused": [error.asked, error.found, error.instead]})
            raise
        members = self.members
        self._answer_clients({"members": [member._asdict() for member in members]})
        return members

    def _serve(self, ready_socket: socket.socket) -> None:
        if ready_socket is self.listener:
            try:
                client, _ = self.listener.accept()
                client.settimeout(2)
                client.sendall(f"{GREETING} {json.dumps(self.launch.world_id)}\n".encode())
            except OSError:
                return
            self.clients[client] = b""
            self.selector.register(client, selectors.EVENT_READ)
            return
        try:
            received = ready_socket.recv(1 << 16)
        except OSError:
            received = b""
        self.clients[ready_socket] += received
        is_expected = ready_socket not in self.admitted and len(self.members) < self.launch.world_size
        if not received or len(self.clients[ready_socket]) > MAX_LINE_BYTES:
            self._drop(ready_socket)
        elif is_expected and (member := _parse_peer(self.clients[ready_socket])):
            self._admit(ready_socket, member)

    def _admit(self, client: socket.socket, member: Peer) -> None:
        self.admitted[client] = member
        if member.world_size != self.launch.world_size:
            raise RequestError(
                f"a world of {self.launch.world_size} (rank 0 on {self.this_peer.host})",
                f"rank {member.rank} on {member.host} expects {member.world_size}",
                "the same command, with the same --nodes and --devices or WORLD_SIZE, on every machine",
            )
        for existing in self.members:
            if existing is not member and existing.rank is not None and existing.rank == member.rank:
                raise RequestError(
                    f"one process with rank {member.rank}",
                    f"two: process {existing.pid} on {existing.host} and process {member.pid} on {member.host}",
                    "a different --node_rank on each machine (or a different RANK for each process)",
                )

    def _drop(self, client: socket.socket) -> None:
        self.selector.unregister(client)
        del self.clients[client]
        self.admitted.pop(client, None)
        client.close()

    def _answer_clients(self, answer: object) -> None:
        """Answers all clients and disconnects them; the listening socket stays open unless the answer is a refusal."""
        too_many_processes = {
            "refused": [f"a world of {self.launch.world_size}", "more processes than that", "fewer of them"]
        }
        for client in list(self.clients):
            with contextlib.suppress(OSError):  # the client has exited; its launcher reports that
                client.sendall((json.dumps(answer if client in self.admitted else too_many_processes) + "\n").encode())
            self._drop(client)
        self.selector.close()
        if isinstance(answer, dict) and "refused" in answer:
            self.listener.close()


def _parse_peer(received: bytes) -> Peer | None:
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
    if launch.listening_fd is not None:
        return socket.socket(fileno=launch.listening_fd)
    ips = network.resolve(launch.address)
    own_addresses = [ip for ip in ips if network.is_local_address(ip)]
    try:
        listener = network.listen(listening_address(launch, own_addresses, interface), launch.port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise RequestError(
            f"port {launch.port} of {socket.gethostname()} for the rendezvous",
            str(error.strerror),
            "--master_port PORT (or MASTER_PORT=PORT), 1024 or more, the same on every machine",
        ) from None
    if not own_addresses and not _reaches_itself(ips, launch.port, listener):
        refusal = wrong_address_error(launch, ips)
        if launch.hosts:  # the other ranks try this host next, see rankzero.distributed.rendezvous.client
            with contextlib.suppress(RequestError):
                RendezvousServer(launch, Peer.this(launch), listener, time.monotonic() + WRONG_ADDRESS_SECONDS, 0).wait(
                    refusal
                )
        listener.close()
        raise refusal
    return listener


def listening_address(launch: Launch, own_addresses: Sequence[str], interface: str | None) -> str:
    """Returns the address to listen on; all addresses (`""`) if it is unknown which one the other ranks use."""
    interface = interface or network.interface_by_variable()
    if interface:
        return network.address_of(interface)
    external_addresses = [ip for ip in own_addresses if not network.is_loopback(ip)]
    if launch.launcher == "pbs" and not launch.is_single_machine:
        return ""  # the address is rank zero's own host name here, and its name in the node file elsewhere
    if (
        own_addresses
        and not external_addresses
        and (launch.is_single_machine or launch.address in ("localhost", *own_addresses))
    ):
        return own_addresses[0]
    # A host name that resolves to loopback here (127.0.1.1 on Debian) resolves to another address on other machines.
    return external_addresses[0] if len(external_addresses) == 1 == len(own_addresses) else ""


def _reaches_itself(ips: Sequence[str], port: int, listener: socket.socket) -> bool:
    """Whether connections to a foreign address arrive at this socket, as in a container with a published port."""
    token = os.urandom(16)
    for ip in ips:
        try:
            with socket.create_connection((ip, port), timeout=3) as outgoing:
                outgoing.sendall(token)
                listener.settimeout(1)
                while True:  # other ranks may already connect; they will retry
                    incoming, _ = listener.accept()
                    with incoming:
                        incoming.settimeout(1)
                        if incoming.recv(len(token)) == token:
                            return True
        except OSError:
            continue
    return False


def reject_clients(launch: Launch, ips: Sequence[str], error: RequestError) -> None:
    """Sends `error` to processes that connect to this machine instead of rank zero's, for `REJECT_SECONDS`."""
    with contextlib.suppress(OSError), network.listen(ips[0], launch.port) as listener:
        server = RendezvousServer(
            launch, Peer.this(launch), listener, time.monotonic() + REJECT_SECONDS, REJECT_SECONDS
        )
        with contextlib.suppress(RequestError):
            server.wait(refusal=error)


class Progress:
    """Reports at intervals which processes or ranks a process is waiting for."""

    def __init__(self, timeout: float) -> None:
        self.started = self.printed_at = time.monotonic()
        self.timeout = timeout

    def print_if_due(self, describe: Callable[[], str]) -> None:
        """Prints a line if `PROGRESS_SECONDS` have passed since the last one; `describe` returns its text."""
        now = time.monotonic()
        if now - self.printed_at > PROGRESS_SECONDS:
            self.printed_at = now
            remaining = self.started + self.timeout - now
            print_error(f"waiting: {describe()}; giving up in {remaining:.0f} s")
