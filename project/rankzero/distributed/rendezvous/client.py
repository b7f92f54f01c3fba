"""The rendezvous: every process connects to rank zero, which answers once all have. Does not import torch.

The rendezvous precedes torch's own (a TCPStore on the same socket), which waits silently and cannot report which ranks
are missing. After the handshake, the other process describes itself. Rank zero answers with the list of all processes,
or with the reason why the run cannot start.
"""

import contextlib
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rankzero.distributed import network
from rankzero.distributed.connections.handshake import DifferentKeyError, WrongListenerError, perform_handshake
from rankzero.distributed.connections.key import Key, find_key
from rankzero.distributed.connections.line_connection import LineConnection, Message
from rankzero.distributed.environments.launch import Launch, RequestedWorld
from rankzero.distributed.environments.validate import check_world
from rankzero.distributed.process.stop_signals import SIGNALS
from rankzero.distributed.rendezvous.errors import (
    different_keys_error,
    missing_key_error,
    missing_processes_error,
    no_answer_error,
    wrong_address_error,
    wrong_listener_error,
)
from rankzero.distributed.rendezvous.listening import listen_for_ranks, reject_clients
from rankzero.distributed.rendezvous.peers import Peer, assign_ranks
from rankzero.distributed.rendezvous.progress import Progress
from rankzero.distributed.rendezvous.server import RendezvousServer
from rankzero.messages import RequestError

NO_ANSWER_SECONDS = 5.0
"""How long a host may stay silent; a running host refuses a connection at once if its port is not open yet."""

GREETING_SECONDS = 5.0
"""How long a process that accepts a connection may take to send the greeting of rank zero."""

ANSWER_SECONDS = 5.0
"""How much later than the deadline rank zero's answer may arrive."""

MAX_ANSWER_BYTES = 64 << 20
"""Bytes of rank zero's answer."""

_POLL_SECONDS = 0.1


@dataclass
class RendezvousResult:
    """All processes of a run, or only this process if no rendezvous was needed.

    Args:
        launch: The position of this process among all processes; complete after a rendezvous.
        members: All processes, by rank; only this process without a rendezvous.
        ip: The address at which rank zero answered.
        listener: The socket on which rank zero accepted the other processes; None on all other ranks.
        key_problem: Why the processes do not share a key; empty if they do.
    """

    launch: Launch
    members: list[Peer]
    ip: str
    listener: socket.socket | None = None
    key_problem: str = ""

    @classmethod
    def without_rendezvous(cls, launch: Launch) -> "RendezvousResult":
        """Returns the result for a process that is alone, or that torchrun has already connected to the other ranks."""
        return cls(launch, [Peer.this(launch)], launch.address)


def find_all_ranks(launch: Launch, requested: RequestedWorld) -> RendezvousResult:
    """Performs the rendezvous if one is needed, and checks that its processes are the requested ones.

    Raises:
        RequestError: The processes are not the requested ones, or one is missing.
    """
    if launch.world_size == 1 or not launch.externally_created or launch.uses_agent_store:
        return RendezvousResult.without_rendezvous(launch)
    rendezvous_result = rendezvous(launch, requested.start_timeout, requested.interface, requested.auth == "required")
    check_world(requested, rendezvous_result.launch)
    return rendezvous_result


def rendezvous(
    launch: Launch, start_timeout: float, interface: str | None = None, requires_key: bool = False
) -> RendezvousResult:
    """Waits until all processes of the world have connected. All ranks must call.

    Args:
        launch: The position of this process among all processes. Not from torchrun, which has already connected them.
        start_timeout: Seconds to wait for all processes.
        interface: `--interface`; if given, rank zero listens only on the address of this interface.
        requires_key: Whether all processes have to know the same key (`--auth required`).

    Raises:
        RequestError: A process is missing, connected twice or belongs to another world, or rank zero is unreachable.
    """
    this_peer, deadline, key = Peer.this(launch), time.monotonic() + start_timeout, find_key()
    try:
        if requires_key and key.secret is None:
            raise missing_key_error(key)
        if interface:
            network.address_of(interface)
        listener = None
        if launch.rank == 0 or (launch.rank is None and launch.node_rank == 0):
            listener = listen_for_ranks(launch, interface, key)
        if listener is None:
            requires_key = requires_key or key.is_explicit
            return _Search(launch, this_peer, deadline, start_timeout, key, requires_key).result()
    except RequestError as error:
        error.local_only = error.reported_elsewhere is None
        raise
    server = RendezvousServer(launch, this_peer, listener, deadline, start_timeout, key, requires_key)
    members = server.wait()
    ip = str(listener.getsockname()[0])
    own_ip = "127.0.0.1" if ip == "0.0.0.0" else ip
    return RendezvousResult(*assign_ranks(launch, this_peer, members), own_ip, listener, server.key_problem)


@dataclass
class _Search:
    """The search of one process for rank zero.

    Args:
        launch: The position of this process among all processes.
        this_peer: The description of this process.
        deadline: Time, in seconds of `time.monotonic`, at which the search ends.
        timeout: The seconds from the start of the search to `deadline`, for messages.
        key: The key of this process.
        requires_key: Whether rank zero has to know the key.
    """

    launch: Launch
    this_peer: Peer
    deadline: float
    timeout: float
    key: Key
    requires_key: bool

    def result(self) -> RendezvousResult:
        """Connects to rank zero, with retries, and returns rank zero's answer.

        Raises:
            RequestError: Rank zero is unreachable, or it answers that the run cannot start.
        """
        launch = self.launch
        ips, started = network.resolve(launch.address), time.monotonic()
        first_host = launch.hosts[0] if launch.hosts and launch.hosts[0] != launch.address else None
        progress, silent_since = Progress(self.timeout), None
        while True:
            was_refused = False
            for ip in ips:
                try:
                    connection = socket.create_connection((ip, launch.port), timeout=2)
                except ConnectionRefusedError:
                    was_refused = True
                    continue
                except OSError:
                    continue
                with connection:
                    answer = self._exchange_descriptions(LineConnection(connection, MAX_ANSWER_BYTES))
                if answer is not None:
                    return self._accepted(answer, ip)
                was_refused = True
            SIGNALS.check_stop_request()
            now = time.monotonic()
            if first_host and now - started > NO_ANSWER_SECONDS / 3:
                # Rank zero runs on the first host even if the given address is wrong, and answers with the error.
                with contextlib.suppress(RequestError):
                    ips += network.resolve(first_host)
                first_host = None
            silent_since = None if was_refused else (silent_since or started)
            if launch.rank == 0 or (silent_since is not None and now - silent_since > NO_ANSWER_SECONDS):
                raise no_answer_error(launch, ips)
            if now - started > NO_ANSWER_SECONDS:
                self._check_address(ips)
            if now > self.deadline:
                error = missing_processes_error(launch, [self.this_peer], self.timeout)
                # Rank zero, the usual reporting rank, is missing.
                error.reported_elsewhere = self.this_peer.local_rank not in (0, None)
                raise error
            if self.this_peer.local_rank == 0:
                progress.print_if_due(lambda: f"rank 0 at {launch.address}:{launch.port}")
            time.sleep(_POLL_SECONDS)

    def _exchange_descriptions(self, connection: LineConnection) -> Message | None:
        """Sends the description of this process to rank zero; returns its answer, or None if the call can be retried.

        Raises:
            RequestError: The listener is not rank zero of this world, or rank zero has another key or does not answer.
        """
        launch, key = self.launch, self.key
        # Local processes on one machine know that the port is rank zero's, so a late greeting is no error.
        is_known_port = launch.launcher == "local" and launch.is_single_machine
        seconds = max(self.deadline - time.monotonic() if is_known_port else GREETING_SECONDS, 0.1)
        try:
            if not perform_handshake(connection, "rendezvous", launch.world_id, key.secret, self.requires_key, seconds):
                return None
        except WrongListenerError as error:
            if not error.greeting and launch.rank != 0 and connection.close_reason:
                return None
            raise wrong_listener_error(launch, error.greeting) from None
        except DifferentKeyError:
            raise different_keys_error(launch, key) from None
        connection.send(self.this_peer._asdict())
        deadline = self.deadline + ANSWER_SECONDS
        while (seconds := deadline - time.monotonic()) > 0:
            messages = connection.receive(seconds)
            if messages is None:
                return None
            if messages:
                return messages[0]
        raise missing_processes_error(launch, [self.this_peer], self.timeout)

    def _accepted(self, answer: Message, ip: str) -> RendezvousResult:
        """Returns the result in rank zero's answer.

        Raises:
            RequestError: Rank zero answers that the run cannot start.
        """
        match answer:
            case {"refused": [str() as asked, str() as found, str() as instead]}:
                refusal = RequestError(asked, found, instead)
                refusal.reported_elsewhere = True
                raise refusal
            case {"members": [*descriptions], "key_problem": str() as key_problem}:
                members = list(filter(None, map(Peer.from_message, descriptions)))
                if self.this_peer in members:
                    launch, members = assign_ranks(self.launch, self.this_peer, members)
                    return RendezvousResult(launch, members, ip, key_problem=key_problem)
        raise wrong_listener_error(self.launch, "")

    def _check_address(self, ips: Sequence[str]) -> None:
        """Checks that the given address is not an address of this machine if rank zero cannot be on it.

        Raises:
            RequestError: It is. The other ranks that connect to this machine receive the same error.
        """
        launch = self.launch
        is_other_machine = bool(launch.node_rank) or (launch.launcher == "mpi" and launch.rank != launch.local_rank)
        is_own_address = any(network.is_local_address(ip) and not network.is_loopback(ip) for ip in ips)
        if launch.is_single_machine or not is_other_machine or not is_own_address:
            return
        error = wrong_address_error(launch, ips)
        if self.this_peer.local_rank == 0:  # the reporter of this machine, see `is_node_reporter`
            reject_clients(launch, ips, error, self.key)
        raise error
