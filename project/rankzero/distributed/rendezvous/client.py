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
from rankzero.distributed.connections.line_server import LineServer, ServedConnection
from rankzero.distributed.connections.link import Link
from rankzero.distributed.connections.local_socket import connect_locally, is_supported, listen_locally
from rankzero.distributed.coordination import network
from rankzero.distributed.environments.launch import Launch
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
from rankzero.distributed.rendezvous.progress import Progress
from rankzero.distributed.rendezvous.ranks import read_view, world_of_rank_zero
from rankzero.distributed.rendezvous.server import RendezvousServer
from rankzero.distributed.timers import TIMERS
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
    is_candidate = uses_leader(launch) and launch.local_rank in (0, None)
    return listen_locally(leader_name(launch)) if is_candidate else None


class NodeLeader:
    """Accepts the other processes of the node and passes their descriptions on to rank zero."""

    def __init__(self, listener: socket.socket, world_id: str) -> None:
        self._listener = listener
        self._server = LineServer([listener], world_id, None, requires_key=False)
        self._peers: dict[ServedConnection, Peer] = {}

    def introduce_all(self, rank_zero: LineConnection) -> None:
        """Sends the descriptions of the processes that have connected so far, over a new connection."""
        for peer in self._peers.values():
            rank_zero.send({"peer": peer._asdict()})

    def serve(self, rank_zero: LineConnection) -> None:
        """Passes on processes that connect or disconnect within a short time."""
        for peer, is_new in self._receive():
            rank_zero.send({"peer": peer._asdict()} if is_new else {"gone": peer.id})

    def _receive(self) -> list[tuple[Peer, bool]]:
        """Returns the processes that connect, with True, or disconnect within a short time."""
        changes = []
        for connection, messages in self._server.poll(TIMERS.poll):
            if messages is None:
                if lost_peer := self._peers.pop(connection, None):
                    changes.append((lost_peer, False))
                continue
            peer = Peer.from_message(messages[0].get("peer")) if messages else None
            if peer and connection not in self._peers:
                self._server.identify(connection)
                self._peers[connection] = peer
                changes.append((peer, True))
        return changes

    def answer(self, message: Message, world: World) -> Link:
        """Sends rank zero's answer to the other processes of the node; returns the link of this process."""
        self._server.stop_accepting()
        self._listener.close()
        ranks = {peer["id"]: peer["rank"] for view in message["views"] for peer in view["peers"]}
        for connection in self._peers:
            connection.send(message)
        self._server.flush(TIMERS.leave)
        served = {connection: [ranks[peer.id]] for connection, peer in self._peers.items() if peer.id in ranks}
        for connection in self._server.connections:
            if connection not in served:
                self._server.disconnect(connection)
        own, own_served = self._server.connect_own()
        return Link(own, str(message["name"]), world.rank, self._server, {**served, own_served: [world.rank]})

    def refuse(self, error: RequestError, count: int | None) -> None:
        """Sends an error to the other processes of the node, for up to `TIMERS.refuse`."""
        deadline, answered = time.monotonic() + TIMERS.refuse, set[ServedConnection]()
        while time.monotonic() < deadline and len(answered) + 1 != count:
            for connection in self._peers.keys() - answered:
                connection.send({"refused": [*error.args]})
                answered.add(connection)
            self._receive()
        self._listener.close()
        self._server.close(TIMERS.leave)


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
        launch, give_up = self.launch, time.monotonic() + TIMERS.leader
        if launch.port == 0:  # rank zero listens on this machine, on a Unix socket only
            give_up = self.deadline
        while uses_leader(launch) and time.monotonic() < give_up:
            if listener := listen_as_leader(launch):
                return self._result_as_leader(NodeLeader(listener, launch.world_id))
            if connection := connect_locally(leader_name(launch)):
                local = LineConnection(connection)
                if (answer := self._exchange_descriptions(local, is_local=True)) is not None:
                    return self._accepted(answer, local)
            SIGNALS.check_stop_request()
            time.sleep(TIMERS.poll)
        if launch.port == 0:
            raise missing_processes_error(launch, [self.this_peer], self.timeout)
        answer, ip, rank_zero = self._ask_rank_zero()
        return self._accepted({**answer, "ip": ip}, rank_zero)

    def _result_as_leader(self, leader: NodeLeader) -> World:
        try:
            answer, ip, rank_zero = self._ask_rank_zero(leader)
            answer["ip"] = ip
            world = self._accepted(answer, rank_zero)
        except RequestError as error:
            leader.refuse(error, self.launch.local_world_size)
            raise
        world.link = leader.answer({**answer, "leader": world.rank}, world)
        world.link.rank_zero = rank_zero
        return world

    def _ask_rank_zero(self, leader: NodeLeader | None = None) -> tuple[Message, str, LineConnection]:
        """Connects to rank zero, with retries; returns its answer, the address at which it answered, the connection."""
        launch = self.launch
        ips, started = network.resolve(launch.address), time.monotonic()
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
                    return answer, ip, connection
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
                raise no_answer_error(launch, ips)
            if now - started > TIMERS.first_answer:
                self._check_address(ips)
            if now > self.deadline:
                error = missing_processes_error(launch, [self.this_peer], self.timeout)
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
        answer = None
        try:
            answer = self._send_descriptions(connection, leader, is_local)
        finally:
            if answer is None:
                connection.close()
        return answer

    def _send_descriptions(
        self, connection: LineConnection, leader: NodeLeader | None, is_local: bool
    ) -> Message | None:
        launch, secret = self.launch, None if is_local else self.key.secret
        # Local processes on one machine know that the port is rank zero's, so a late greeting is no error.
        is_known_port = is_local or (launch.launcher == "local" and launch.is_single_machine)
        seconds = max(self.deadline - time.monotonic() if is_known_port else TIMERS.first_answer, 0.1)
        requires_key = self.requires_key and not is_local
        try:
            if not perform_handshake(connection, launch.world_id, secret, requires_key, seconds):
                return None
        except WrongListenerError as error:
            if is_local:
                return None
            raise wrong_listener_error(launch, error.greeting) from None
        except DifferentKeyError:
            if launch.rank == 0:  # another program or run on this machine listens on the port
                raise no_answer_error(launch, network.resolve(launch.address)) from None
            raise different_keys_error(launch, self.key) from None
        connection.send({"peer": self.this_peer._asdict()})
        if leader:
            connection.connection.setblocking(False)
            leader.introduce_all(connection)
        deadline = self.deadline + TIMERS.late_answer
        while (seconds := deadline - time.monotonic()) > 0:
            if leader:
                leader.serve(connection)
                connection.flush()
                SIGNALS.check_stop_request()
            messages = connection.receive(0 if leader else seconds, only_first=True)
            if messages is None:
                return None
            if messages:
                return messages[0]
        raise missing_processes_error(launch, [self.this_peer], self.timeout)

    def _accepted(self, answer: Message, connection: LineConnection) -> World:
        """Returns the world in rank zero's answer, with `ip`, the address at which it answered.

        A refusal that another process of this machine has sent or passed on has no address.
        """
        try:
            return self._world_of(answer, connection)
        except RequestError:
            connection.close()
            raise

    def _world_of(self, answer: Message, connection: LineConnection) -> World:
        ip = str(answer.get("ip", ""))
        match answer:
            case {"refused": [str() as asked, str() as found, str() as instead]}:
                refusal = RequestError(asked, found, instead)
                # Rank zero reports a refusal of all processes, and the process itself one of a single process.
                refusal.reported_elsewhere = None if "is_single" in answer else True
                refusal.is_remote = bool(ip) and not network.is_local_address(ip)
                raise refusal
            case {"views": [*views], "key_problem": str() as key_problem, "name": str() as name}:
                for view in views:
                    if world := read_view(self.launch, self.this_peer, view):
                        world.address, world.key_problem = ip or world.address, key_problem
                        world.link = Link(connection, name, int(answer.get("leader", 0)))
                        return world
        raise wrong_listener_error(self.launch, "")

    def _check_address(self, ips: Sequence[str]) -> None:
        """Refuses an address of this machine if rank zero cannot be on it, also to ranks that connect here."""
        launch = self.launch
        is_other_machine = bool(launch.node_rank) or (launch.launcher == "mpi" and launch.rank != launch.local_rank)
        is_own_address = any(network.is_local_address(ip) and not network.is_loopback(ip) for ip in ips)
        if launch.is_single_machine or not is_other_machine or not is_own_address:
            return
        error = wrong_address_error(launch, ips)
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
            raise missing_key_error(key)
        if interface:
            network.address_of(interface)
        may_listen = launch.rank == 0 or (launch.rank is None and launch.node_rank == 0)
        if may_listen and listener is None:
            listener = listen_for_ranks(launch, interface, key)
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
