"""The rendezvous: every process connects to rank zero, which answers once all have. Does not import torch.

The rendezvous precedes torch's own (a TCPStore on the same socket), which waits silently and cannot report which ranks
are missing. The protocol consists of three lines. Rank zero sends a greeting, and the other process describes itself.
Rank zero answers with the list of all processes, or with the reason why the run cannot start.
"""

import contextlib
import json
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rankzero.distributed import network
from rankzero.distributed.environments.launch import Launch, RequestedWorld
from rankzero.distributed.environments.validate import check_world
from rankzero.distributed.process.stop_signals import SIGNALS
from rankzero.distributed.rendezvous.errors import (
    GREETING,
    missing_processes_error,
    no_answer_error,
    wrong_address_error,
    wrong_listener_error,
)
from rankzero.distributed.rendezvous.peers import Peer, assign_ranks
from rankzero.distributed.rendezvous.server import (
    MAX_LINE_BYTES,
    Progress,
    RendezvousServer,
    listen_for_ranks,
    reject_clients,
)
from rankzero.messages import RequestError

NO_ANSWER_SECONDS = 5.0
"""How long a host may stay silent; a running host refuses a connection at once if its port is not open yet."""

GREETING_SECONDS = 5.0
"""How long a process that accepts a connection may take to send the greeting of rank zero."""

_POLL_SECONDS = 0.1


@dataclass
class RendezvousResult:
    """All processes of a run, or only this process if no rendezvous was needed.

    Args:
        launch: The position of this process among all processes; complete after a rendezvous.
        members: All processes, by rank; only this process without a rendezvous.
        ip: The address at which rank zero answered.
        listener: The socket on which rank zero accepted the other processes; None on all other ranks.
    """

    launch: Launch
    members: list[Peer]
    ip: str
    listener: socket.socket | None = None

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
    rendezvous_result = rendezvous(launch, requested.start_timeout, requested.interface)
    check_world(requested, rendezvous_result.launch)
    return rendezvous_result


def rendezvous(launch: Launch, start_timeout: float, interface: str | None = None) -> RendezvousResult:
    """Waits until all processes of the world have connected. All ranks must call.

    Args:
        launch: The position of this process among all processes. Not from torchrun, which has already connected them.
        start_timeout: Seconds to wait for all processes.
        interface: `--interface`; if given, rank zero listens only on the address of this interface.

    Raises:
        RequestError: A process is missing, connected twice or belongs to another world, or rank zero is unreachable.
    """
    this_peer, deadline = Peer.this(launch), time.monotonic() + start_timeout
    try:
        if interface:
            network.address_of(interface)
        listener = None
        if launch.rank == 0 or (launch.rank is None and launch.node_rank == 0):
            listener = listen_for_ranks(launch, interface)
        if listener is None:
            members, ip = _connect_to_rank_zero(launch, this_peer, deadline, start_timeout)
            return RendezvousResult(*assign_ranks(launch, this_peer, members), ip)
    except RequestError as error:
        error.local_only = error.reported_elsewhere is None
        raise
    members = RendezvousServer(launch, this_peer, listener, deadline, start_timeout).wait()
    ip = str(listener.getsockname()[0])
    return RendezvousResult(*assign_ranks(launch, this_peer, members), "127.0.0.1" if ip == "0.0.0.0" else ip, listener)


def _connect_to_rank_zero(launch: Launch, this_peer: Peer, deadline: float, timeout: float) -> tuple[list[Peer], str]:
    """Connects to rank zero, with retries; returns all processes, and the address at which rank zero answered."""
    ips, started = network.resolve(launch.address), time.monotonic()
    first_host = launch.hosts[0] if launch.hosts and launch.hosts[0] != launch.address else None
    progress, silent_since = Progress(timeout), None
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
                members = _exchange_descriptions(connection, launch, this_peer, deadline, timeout)
            if members is not None:
                return members, ip
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
        if (
            now - started > NO_ANSWER_SECONDS
            and not launch.is_single_machine
            and _is_address_of_wrong_machine(launch, ips)
        ):
            error = wrong_address_error(launch, ips)
            if this_peer.local_rank == 0:  # the reporter of this machine, see `is_node_reporter`
                reject_clients(launch, ips, error)
            raise error
        if now > deadline:
            error = missing_processes_error(launch, [this_peer], timeout)
            # Rank zero, the usual reporting rank, is missing.
            error.reported_elsewhere = this_peer.local_rank not in (0, None)
            raise error
        if this_peer.local_rank == 0:
            progress.print_if_due(lambda: f"rank 0 at {launch.address}:{launch.port}")
        time.sleep(_POLL_SECONDS)


def _exchange_descriptions(
    connection: socket.socket, launch: Launch, this_peer: Peer, deadline: float, timeout: float
) -> list[Peer] | None:
    """Sends the description of this process to rank zero; returns all processes, or None if the call can be retried.

    Raises:
        RequestError: The listener is not rank zero of this world, or rank zero answers that the run cannot start.
    """
    was_greeted = False
    try:
        with connection.makefile("rwb") as stream:
            # Local processes on one machine know that the port is rank zero's, so a late greeting is no error.
            is_known_port = launch.launcher == "local" and launch.is_single_machine
            connection.settimeout(max(deadline - time.monotonic() if is_known_port else GREETING_SECONDS, 0.1))
            greeting = stream.readline(4096).decode(errors="replace").strip()
            if greeting != f"{GREETING} {json.dumps(launch.world_id)}":
                if not greeting and launch.rank != 0:
                    return None
                raise wrong_listener_error(launch, greeting)
            was_greeted = True
            stream.write((json.dumps(this_peer._asdict()) + "\n").encode())
            stream.flush()
            connection.settimeout(max(deadline - time.monotonic(), 0) + 5)
            text = stream.readline(MAX_LINE_BYTES * 64)
    except TimeoutError:
        raise (
            missing_processes_error(launch, [this_peer], timeout) if was_greeted else wrong_listener_error(launch, "")
        ) from None
    except OSError:
        return None
    if not text:
        return None
    answer = json.loads(text)
    if "refused" in answer:
        refusal = RequestError(*answer["refused"])
        refusal.reported_elsewhere = True
        raise refusal
    return [Peer(**member) for member in answer["members"]]


def _is_address_of_wrong_machine(launch: Launch, ips: Sequence[str]) -> bool:
    """Whether the given address is an address of this machine, although rank zero cannot be on it."""
    is_other_machine = bool(launch.node_rank) or (launch.launcher == "mpi" and launch.rank != launch.local_rank)
    return is_other_machine and any(network.is_local_address(ip) and not network.is_loopback(ip) for ip in ips)
