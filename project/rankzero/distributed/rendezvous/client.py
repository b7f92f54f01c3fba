"""The rendezvous: every process connects to rank zero, which answers once all have.

The rendezvous precedes torch's own (a TCPStore on the same socket), which waits silently and cannot report which ranks
are missing. On each machine, one process, the leader, connects to rank zero and describes all processes of the
machine. Rank zero answers with their positions, or with the reason why the run cannot start. The connections stay open
and become the control channel.
"""

import contextlib
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rankzero.distributed.connections.handshake import DifferentKeyError, WrongListenerError, perform_handshake
from rankzero.distributed.connections.key import Key, find_key
from rankzero.distributed.connections.line_connection import LineConnection, Message, keep_alive
from rankzero.distributed.connections.local_socket import connect_locally, is_supported, listen_locally
from rankzero.distributed.coordination import network
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.process.stop_signals import SIGNALS
from rankzero.distributed.rendezvous import errors
from rankzero.distributed.rendezvous.listening import listen_for_ranks, reject_clients, resolve_address
from rankzero.distributed.rendezvous.ranks import read_view, world_of_rank_zero
from rankzero.distributed.rendezvous.server import RendezvousServer
from rankzero.distributed.stop_and_failure.leader import Link, NodeLeader
from rankzero.distributed.stop_and_failure.protocol import FROM_SERVER, read
from rankzero.distributed.timers import TIMERS, Progress
from rankzero.distributed.world import Peer, World
from rankzero.messages import AnotherRankFailed, RequestError


def uses_leader(launch: Launch) -> bool:
    """Returns whether the processes of this node connect through a leader, which the kernel identifies."""
    return is_supported() and launch.local_world_size != 1 and (launch.uses_agent_store or not launch.is_single_machine)


def leader_name(launch: Launch) -> str:
    """Returns the name under which the leader of this node listens."""
    return f"rendezvous {launch.world_id} {launch.address}:{launch.port} {launch.node_rank}"


def listen_as_leader(launch: Launch) -> socket.socket | None:
    """Returns the leader's listening socket; None if this process is not the leader."""
    return listen_locally(leader_name(launch)) if uses_leader(launch) and launch.local_rank in (0, None) else None


@dataclass
class RankZeroSearch:
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

    def result(self) -> World:
        """Connects to rank zero, itself or through the leader of its node, and returns rank zero's answer.

        Raises:
            RequestError: Rank zero is unreachable, or it answers that the run cannot start.
        """
        launch = self.launch
        # Port 0: rank zero listens on this machine, on a Unix socket only.
        give_up = self.deadline if launch.port == 0 else time.monotonic() + TIMERS.leader
        while uses_leader(launch) and time.monotonic() < give_up:
            if listener := listen_as_leader(launch):
                return self._result_as_leader(NodeLeader([listener], launch.world_id))
            if connection := connect_locally(leader_name(launch)):
                local = LineConnection(connection)
                if (answer := self._exchange_descriptions(local, is_local=True)) is not None:
                    return self._world_of(answer, local)
            SIGNALS.check_stop_request()
            time.sleep(TIMERS.poll)
        if launch.port == 0:
            raise errors.missing_processes_error(launch, [self.this_peer], self.timeout)
        return self._world_of(*self._ask_rank_zero())

    def _result_as_leader(self, leader: NodeLeader) -> World:
        try:
            answer, rank_zero = self._ask_rank_zero(leader)
            world = self._world_of(answer, rank_zero)
        except RequestError as error:
            leader.refuse(error, self.launch.local_world_size)
            raise
        leader.rank_zero = rank_zero
        own = leader.answer({**answer, "leader": world.rank}, world.rank)
        world.link = Link(own, world.rank, node_leader=leader)
        return world

    def _ask_rank_zero(self, leader: NodeLeader | None = None) -> tuple[Message, LineConnection]:
        """Connects to rank zero, with retries; returns its answer, with its address as `ip`, and the connection."""
        launch = self.launch
        ips, started = resolve_address(launch, self.deadline), time.monotonic()
        first_host = launch.hosts[0] if launch.hosts and launch.hosts[0] != launch.address else None
        progress, silent_since = Progress(self.timeout), None
        while True:
            was_refused, refusals = False, 0
            for ip in ips:
                try:
                    connection = LineConnection(socket.create_connection((ip, launch.port), timeout=TIMERS.attempt))
                    keep_alive(connection.connection)
                except ConnectionRefusedError:
                    was_refused, refusals = True, refusals + 1
                    continue
                except OSError:
                    continue
                if (answer := self._exchange_descriptions(connection, leader)) is not None:
                    return {**answer, "ip": ip}, connection
                was_refused = True
            SIGNALS.check_stop_request()
            if launch.uses_agent_store and refusals == len(ips):  # rank zero listened before it published its address
                raise AnotherRankFailed(f"rank 0 has ended: nothing listens at {launch.address}:{launch.port} any more")
            now = time.monotonic()
            if first_host and now - started > TIMERS.first_answer / 3:
                # Rank zero runs on the first host even if the given address is wrong, and answers with the error.
                with contextlib.suppress(RequestError):
                    ips += network.resolve(first_host)
                first_host = None
            silent_since = None if was_refused else (silent_since or started)
            if launch.rank == 0 or (silent_since is not None and now - silent_since > TIMERS.first_answer):
                raise errors.no_answer_error(launch, ips)
            if now - started > TIMERS.first_answer:
                self._check_address(ips)
            if now > self.deadline:
                error = errors.missing_processes_error(launch, [self.this_peer], self.timeout)
                # Rank zero, the usual reporting rank, is missing.
                error.reported_elsewhere = self.this_peer.local_rank not in (0, None)
                raise error
            if self.this_peer.local_rank == 0:
                progress.print_if_due(lambda: f"rank 0 at {launch.address}:{launch.port}")
            time.sleep(TIMERS.poll)

    def _exchange_descriptions(
        self, connection: LineConnection, leader: NodeLeader | None = None, is_local: bool = False
    ) -> Message | None:
        """Sends the description of this process; returns rank zero's answer, or None if the call can be retried.

        A leader also sends the descriptions of the other processes of its node. Without an answer, the connection is
        closed.
        """
        launch, secret = self.launch, None if is_local else self.key.secret
        # Local processes on one machine know that the port is rank zero's, so a late greeting is no error.
        is_known_port = is_local or (launch.launcher == "local" and launch.is_single_machine)
        seconds = max(self.deadline - time.monotonic() if is_known_port else TIMERS.first_answer, 0.1)
        requires_key = self.requires_key and not is_local
        with contextlib.ExitStack() as closing:
            closing.callback(connection.close)
            try:
                if not perform_handshake(connection, launch.world_id, secret, requires_key, seconds):
                    return None
            except WrongListenerError as error:
                if is_local:
                    return None
                raise errors.wrong_listener_error(launch, str(error)) from None
            except DifferentKeyError:
                if launch.rank == 0:  # another program or run on this machine listens on the port
                    raise errors.no_answer_error(launch, network.resolve(launch.address)) from None
                raise errors.different_keys_error(launch, self.key) from None
            connection.send({"peer": self.this_peer._asdict()})
            if leader:
                connection.connection.setblocking(False)
                leader.introduce_all(connection)
            deadline = self.deadline + TIMERS.late_answer
            while (seconds := deadline - time.monotonic()) > 0:
                if leader:
                    leader.introduce_new(connection)
                    connection.flush()
                    SIGNALS.check_stop_request()
                if (messages := connection.receive(0 if leader else seconds, only_first=True)) is None:
                    return None
                if messages:
                    closing.pop_all()
                    return messages[0]
            raise errors.missing_processes_error(launch, [self.this_peer], self.timeout)

    def _world_of(self, answer: Message, connection: LineConnection) -> World:
        """Returns the world in rank zero's answer; the connection is closed if that is a refusal.

        `ip` in the answer is the address of rank zero. A refusal from another process of this machine has none.
        """
        entries = dict(read(answer, FROM_SERVER))
        ip = entries.get("ip", "")
        if "refused" in entries:
            connection.close()
            refusal = RequestError(*entries["refused"])
            # Rank zero reports a refusal of all processes, and the process itself one of a single process.
            refusal.reported_elsewhere = None if "is_single" in entries else True
            refusal.is_remote = bool(ip) and not network.is_local_address(ip)
            raise refusal
        for view in entries.get("views", ()):
            if world := read_view(self.launch, self.this_peer, view):
                world.address, world.key_problem = ip or world.address, entries.get("key_problem", "")
                world.link = Link(connection, entries.get("leader", 0))
                return world
        connection.close()
        raise errors.wrong_listener_error(self.launch, "")

    def _check_address(self, ips: Sequence[str]) -> None:
        """Refuses an address of this machine if rank zero cannot be on it, also to ranks that connect here."""
        launch = self.launch
        is_other_machine = bool(launch.node_rank) or (launch.launcher == "mpi" and launch.rank != launch.local_rank)
        is_own_address = any(network.is_local_address(ip) and not network.is_loopback(ip) for ip in ips)
        if launch.is_single_machine or not is_other_machine or not is_own_address:
            return
        error = errors.wrong_address_error(launch, ips)
        if self.this_peer.local_rank == 0:  # the reporter of this machine, see `is_node_reporter`
            reject_clients(launch, ips, error, self.key)
        raise error


def rendezvous(
    launch: Launch,
    start_timeout: float,
    interface: str | None = None,
    requires_key: bool = False,
    listener: socket.socket | None = None,
) -> World:
    """Waits until all processes of the world have connected. All ranks must call.

    Args:
        launch: The position of this process among all processes.
        start_timeout: Seconds to wait for all processes.
        interface: `--interface`; if given, rank zero listens only on the address of this interface.
        requires_key: Whether all processes have to know the same key (`--auth required`).
        listener: A socket of rank zero's that already listens at the address and port of `launch`.

    Raises:
        RequestError: A process is missing, connected twice or belongs to another world, or rank zero is unreachable.
    """
    deadline = time.monotonic() + start_timeout
    try:
        key = find_key()
        this_peer = Peer.this(launch, key)
        if requires_key and key.secret is None:
            raise errors.missing_key_error(key)
        if interface:
            network.address_of(interface)
        may_listen = launch.rank == 0 or (launch.rank is None and launch.node_rank == 0)
        if may_listen and listener is None:
            listener = listen_for_ranks(launch, interface, key, deadline)
        if listener is None:
            # If this process has found the port in use, rank zero is on this machine, where it has the same key.
            requires_key = requires_key or key.is_explicit or (may_listen and key.secret is not None)
            return RankZeroSearch(launch, this_peer, deadline, start_timeout, key, requires_key).result()
    except RequestError as error:
        error.local_only = error.reported_elsewhere is None
        raise
    local_listener = listen_as_leader(launch)
    listeners = [listener, *([local_listener] if local_listener else [])]
    server = RendezvousServer(launch, this_peer, listeners, deadline, start_timeout, key, requires_key)
    assigned = server.wait()
    for opened in listeners:
        if opened.family == socket.AF_UNIX:
            opened.close()
    world = world_of_rank_zero(launch, this_peer, assigned)
    world.address, world.link = network.reachable_address(listener), server.link
    world.key_problem = server.key_problem
    return world
