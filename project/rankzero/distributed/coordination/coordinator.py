"""Coordinates the processes of a run: they exchange objects, start only if all of them can, and exit together."""

import json
import math
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from hashlib import sha256
from types import TracebackType
from typing import Any, TypeVar

import torch
from typing_extensions import Self, override

from rankzero.distributed.coordination import network
from rankzero.distributed.coordination.join import find_requested_ranks
from rankzero.distributed.coordination.process_group import destroy_process_group, init_process_group
from rankzero.distributed.environments.launch import Launch, RequestedWorld
from rankzero.distributed.process.stop_signals import SIGNALS
from rankzero.distributed.rendezvous.client import listen_as_leader
from rankzero.distributed.rendezvous.errors import UNAUTHENTICATED_ADVICE
from rankzero.distributed.rendezvous.listening import listening_address
from rankzero.distributed.stop_and_failure.channel import ControlChannel
from rankzero.distributed.stop_and_failure.leader import Link
from rankzero.distributed.timers import TIMERS, Progress
from rankzero.distributed.torch_inside import HashStore, PrefixStore, Store, TCPStore
from rankzero.distributed.world import Peer, World
from rankzero.messages import (
    AnotherRankFailed,
    CannotStart,
    LeftEarlyError,
    Stopped,
    as_refusal,
    is_peer_failure,
    mark_reported,
    print_error,
)

T = TypeVar("T")

_STOPPED = "rankzero was stopped"


class Coordinator:
    """Exchanges objects between the processes of a run through the control channel.

    A context manager that all ranks must enter.

    Attributes:
        world: The known processes; on rank zero, and after `share_peers`, all.
        control_channel: The control channel of this rank.

    Raises:
        RequestError: The launched processes are not the requested ones.
    """

    def __init__(self, world: World, requested: RequestedWorld) -> None:
        # A rank that is waited for is alive: only the user knows how long it may take.
        self.timeout = math.inf if requested.start_timeout is None else requested.start_timeout
        self._start_timeout = requested.rendezvous_timeout
        self._agent_store: Store | None = None
        self._store: Store | None = None
        if world.launch.uses_agent_store:
            self._agent_store = self._connect_to_agent(world.launch)
            if self._agent_store.check([_STOPPED]):
                raise Stopped("torchrun restarted a run that was stopped at a safe point; it stays stopped")
            # torchrun's store outlives its workers. The prefix hides the keys of earlier attempts, except `_STOPPED`.
            self._store = PrefixStore(f"rankzero {world.launch.world_id}", self._agent_store)
            if world.size > 1:
                world = self._find_ranks(self._store, world.launch, requested)
        self.world = world
        link: Link | None = world.link
        world.link = None  # a world can be copied and pickled, a socket cannot
        self._listener = link.listener if link else None
        if self._agent_store and self._listener:
            self._listener.close()
            self._listener = None
        self.control_channel = ControlChannel(world, link)
        if world.key_problem and world.rank == 0:
            print_error(f"the control channel is not authenticated: {world.key_problem}; {UNAUTHENTICATED_ADVICE}")
        if world.size > 1:
            network.use_interface(requested.interface, self._find_interface())

    def _connect_to_agent(self, launch: Launch) -> TCPStore:
        """Connects to the store of torchrun's agent, which listens before it starts this process."""
        limit, address = timedelta(seconds=self._start_timeout), f"{launch.address}:{launch.port}"
        try:
            return TCPStore(launch.address, launch.port, is_master=False, timeout=limit, wait_for_workers=False)
        except torch.distributed.DistError:
            raise AnotherRankFailed(f"torchrun did not answer at {address} within {self._start_timeout:g} s") from None

    def _find_ranks(self, store: Store, launch: Launch, requested: RequestedWorld) -> World:
        """Performs the rendezvous of torchrun's processes, which find rank zero's address in the agent's store.

        On a single machine, they connect through a Unix socket (port 0), whose other end the kernel identifies. As the
        store has no authentication, a process that is led to another address requires the key as on several machines.

        Raises:
            RequestError: The processes are not the requested ones, or do not share a required key.
            AnotherRankFailed: Rank zero does not listen in time.
        """
        found, listener, is_single_machine = launch._replace(port=0), None, launch.is_single_machine
        if launch.rank == 0:
            listener = listen_as_leader(found) if is_single_machine else None
            if listener is None:
                ips = [ip for ip in network.resolve(launch.address) if network.is_local_address(ip)]
                address = "127.0.0.1" if is_single_machine else listening_address(launch, ips, requested.interface)
                listener = network.listen(address, 0)
                address, port = listener.getsockname()[:2]
                found = found._replace(port=port, address=launch.address if address in ("0.0.0.0", "::") else address)
            store.set("rank zero", json.dumps([found.address, found.port]))
        else:
            address, port = json.loads(self._wait_for(store, "rank zero", launch.world_size))
            found = found._replace(address=address, port=port)
        is_identified = found.port == 0
        world = find_requested_ranks(requested, found, requested.auth == "required" and not is_identified, listener)
        world.launch = world.launch._replace(address=launch.address, port=launch.port)
        world.address, world.key_problem = launch.address, "" if is_identified else world.key_problem
        return world

    def _wait_for(self, store: Store, key: str, ranks: int) -> bytes:
        """Returns a value that rank zero sets in a store, which all ranks ask."""
        deadline, progress = time.monotonic() + self._start_timeout, Progress(self._start_timeout)
        while not store.check([key]):  # torch prints a warning for each `wait` that times out
            SIGNALS.check_stop_request()
            if time.monotonic() > deadline:
                raise AnotherRankFailed(f"rank 0 was still starting after {self._start_timeout:g} s")
            progress.print_if_due(lambda: "rank 0 is starting")
            time.sleep(max(TIMERS.poll, ranks / 20_000))
        return bytes(store.get(key))

    def _find_interface(self) -> str | None:
        """Returns the interface that reaches the other machines; None if it is unknown. All ranks must call."""
        launch = self.world.launch
        if launch.num_nodes == 1:
            return "lo"
        address = network.resolve(launch.address)[0]
        node, first_node = launch.node_rank, self.world.peers[0].node_rank
        # Rank zero's machine reaches its own address through `lo`, so it looks for the way to another machine.
        other = self.decide(
            [node, network.source_address(address)],
            lambda values: next((source for other_node, source in values if source and other_node != first_node), None),
        )
        source = network.source_address(other if node == first_node and other else address)
        return network.interface_of(source) if source else None

    def decide(
        self, value: Any, choose: Callable[[list[Any]], Any], seconds: float | None = None, work: str = "starting"
    ) -> Any:
        """Sends a value to rank zero, which decides; returns the decision on all ranks. All ranks must call.

        Args:
            value: The JSON-serializable value of this rank.
            choose: Called on rank zero with the values of all ranks, by rank; returns a JSON-serializable decision.
            seconds: How long to wait for all ranks; by default `--start_timeout`, or as long as all are alive.
            work: What a late rank is doing, for messages.

        Raises:
            RequestError: On all ranks, if `choose` raised it.
            AnotherRankFailed: A rank did not provide its value in time.
        """
        return self.control_channel.exchange.decide(value, choose, self.timeout if seconds is None else seconds, work)

    def broadcast_object(self, value: Any, work: str = "starting") -> Any:
        """Returns rank zero's JSON-serializable value on all ranks. All ranks must call."""
        return self.decide(value if self.world.rank == 0 else None, lambda values: values[0], work=work)

    def share_peers(self) -> None:
        """Makes rank, host and process id of all processes known to every process. All ranks must call."""
        by_host: dict[str, list[list[int | None]]] = {}
        for rank, peer in self.world.peers.items():
            by_host.setdefault(peer.host, []).append([rank, peer.local_rank, peer.node_rank, peer.pid])
        peers = {
            rank: Peer(rank, local_rank, node_rank, self.world.size, host, pid)
            for host, members in self.broadcast_object(by_host).items()
            for rank, local_rank, node_rank, pid in members
        }
        self.world.peers = {rank: self.world.peers.get(rank, peers[rank]) for rank in sorted(peers)}

    def run_on_all_ranks(self, work: Callable[[], T], description: str = "starting") -> T:
        """Runs `work` on every rank and returns its result, or raises on every rank if one fails. All ranks must call.

        Raises:
            CannotStart: `work` raised it on at least one rank.
            AnotherRankFailed: `work` raised any other exception on another rank.
            LeftEarlyError: `work` raised SystemExit or KeyboardInterrupt on this rank.
        """
        result, error = None, None
        try:
            result = work()
        except Exception as caught:
            error = caught
        except (SystemExit, KeyboardInterrupt) as caught:
            error = LeftEarlyError(f"your code ended the process: {caught!r}")
        own = {} if error is None else {"failed": repr(error)}
        if isinstance(error, CannotStart):
            own = {"refused": str(error), "summary": error.summary}
        name_of = self.world.name_of
        outcome = Outcomes(**self.decide(own, lambda values: asdict(Outcomes.of(values, name_of)), work=description))
        if error is not None and not isinstance(error, CannotStart):
            raise error
        if outcome.refusals:
            raise outcome.refusal(error, self.world.rank)
        if outcome.failed_name:
            raise AnotherRankFailed(f"{outcome.failed_name} failed: {outcome.failure}")
        return result  # type: ignore[return-value]

    def run_on_rank_zero(self, work: Callable[[], T]) -> T:
        """Runs `work` on rank zero and returns its JSON-serializable result on all ranks. All ranks must call.

        Raises:
            CannotStart: On every rank, if `work` raised it.
            AnotherRankFailed: On the other ranks, if `work` raised any other exception.
        """
        result: T = self.broadcast_object(self.run_on_all_ranks(lambda: work() if self.world.rank == 0 else None))
        return result

    def barrier_before_exit(self) -> None:
        """Waits for all ranks before a stopped run exits. All ranks must call.

        Launchers terminate all processes as soon as one has exited. torchrun treats every exit code except 0 as a
        failure, and restarts all processes if `--max-restarts` allows it. So torchrun's store records the stop.
        """
        # When a machine joins an elastic torchrun, its workers are signaled and restarted: this is no stop to record.
        if self._agent_store and not self.world.launch.elastic:
            self._agent_store.set(_STOPPED, "")
        self.decide(None, lambda values: None, work="ending the run")

    def init_process_group(self, backend: str, device: torch.device, timeout: timedelta | None) -> None:
        """Creates torch's process group if none exists. All ranks must call."""
        if torch.distributed.is_initialized():
            return
        if self._store is None:
            self._store = self._open_store() if self.world.size > 1 else HashStore()
        init_process_group(self._store, self.world, backend, device, timeout)

    def _open_store(self) -> Store:
        """Returns the store of the process groups, which rank zero serves on the socket of the rendezvous."""
        address, port, limit = self.world.address, self.world.launch.port, timedelta(seconds=self._start_timeout)
        store: Store | None = None
        if self._listener:
            port = self._listener.getsockname()[1]
            fd, self._listener = self._listener.detach(), None
            store = TCPStore(address, port, is_master=True, timeout=limit, wait_for_workers=False, master_listen_fd=fd)
        self.broadcast_object(None)  # rank zero serves the store
        return store or TCPStore(address, port, is_master=False, timeout=limit, wait_for_workers=False)

    def __enter__(self) -> Self:
        self.control_channel.watch_for_early_exit()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        refusal = as_refusal(error) if error else None
        is_refused = isinstance(refusal, CannotStart)
        try:
            if isinstance(refusal, CannotStart) and refusal.reported_elsewhere is None:
                choose_reporter(refusal, self.control_channel)
            elif name := self.refusing_rank(error):
                is_refused = True
                raise reported_by(name, RankRefusal(name, "  see its output", "see its output")) from None
            elif error is not None and not is_refused:
                self._report_failure(error)
            if refusal is not None and refusal is not error:
                raise refusal from error
        finally:
            has_left_group = destroy_process_group(after_error=error is not None)
            if error and is_refused and not has_left_group:
                self._report_failure(error)  # the other ranks may be waiting in a collective
            self.control_channel.close()
            if self._listener:
                self._listener.close()

    def refusing_rank(self, error: BaseException | None) -> str | None:
        """Returns the name of the rank whose refusal has caused an error of this rank; None without one."""
        refusals = self.control_channel.refusals() if isinstance(error, Exception) and is_peer_failure(error) else {}
        return next(iter(refusals.values()), None)

    def _report_failure(self, error: BaseException) -> None:
        """Reports this rank's failure, so that the other ranks exit before the process group is destroyed.

        This method uses no collective, since the other ranks may be anywhere in the program.
        """
        cause = f"{self.world.name_of(self.world.rank)} failed: {error!r}"
        reported_cause = is_peer_failure(error) and self.control_channel.failure_cause(TIMERS.cause)
        if reported_cause or not self.control_channel.report_failure(cause):
            mark_reported(error)


class RankRefusal(CannotStart):
    """The refusal of one rank."""

    def __init__(self, name: str, text: str, reason: str) -> None:
        super().__init__(name, text, reason)
        self.name, self.text, self.reason = name, text, reason

    def __str__(self) -> str:
        return f"  {self.name}:\n{self.text}"

    @property
    @override
    def summary(self) -> str:
        return f"{self.name} cannot start: {self.reason}"


@dataclass
class Outcomes:
    """How a piece of work ended on all ranks.

    Args:
        refusals: Text of each refusal -> the lowest rank with this text, its name, and the refusal in one line.
        all_refuse: Whether all ranks refuse.
        failed_name: Name of the lowest rank on which the work failed with another error; empty if there is none.
        failure: The error of that rank.
    """

    refusals: dict[str, tuple[int, str, str]]
    all_refuse: bool
    failed_name: str
    failure: str

    @classmethod
    def of(cls, outcomes: Sequence[Mapping[str, str]], name_of: Callable[[int], str]) -> "Outcomes":
        """Summarizes the outcomes of all ranks.

        Args:
            outcomes: By rank: `refused` or `failed` -> text of the error, and `summary` -> a refusal in one line; empty
                after success.
            name_of: Returns the name of a rank for messages.
        """
        refusals: dict[str, tuple[int, str, str]] = {}
        for rank, outcome in enumerate(outcomes):
            if text := outcome.get("refused"):
                refusals.setdefault(text, (rank, name_of(rank), outcome["summary"]))
        failed = next((rank for rank, outcome in enumerate(outcomes) if "failed" in outcome), None)
        name, failure = ("", "") if failed is None else (name_of(failed), outcomes[failed]["failed"])
        return cls(refusals, all("refused" in outcome for outcome in outcomes), name, failure)

    def refusal(self, own_error: CannotStart | None, own_rank: int) -> CannotStart:
        """Returns the refusal that this rank raises: its own, or the first one by rank.

        Of several ranks with the same refusal, the lowest reports it.
        """
        text = str(own_error) if own_error else next(iter(self.refusals))
        rank, name, summary = self.refusals[text]
        is_reporter = own_error is not None and own_rank == rank
        if own_error is None or (is_reporter and not self.all_refuse):
            return reported_by(name, RankRefusal(name, text, summary), is_reporter)
        return reported_by(name, own_error, is_reporter)


def choose_reporter(refusal: CannotStart, channel: ControlChannel) -> None:
    """Notes in a refusal whether another rank reports the same text; the first rank that calls this reports it."""
    digest, own_name = sha256(str(refusal).encode()).hexdigest(), channel.world.name_of(channel.rank)
    reporter = channel.refusals(digest).get(digest, own_name)
    reported_by(reporter, refusal, reporter == own_name)


def reported_by(name: str, refusal: CannotStart, is_own: bool = False) -> CannotStart:
    """Notes in a refusal that the rank with this name reports it, which may be this rank; returns the refusal."""
    refusal.reported_elsewhere = not is_own
    refusal.is_remote = not is_own and not name.endswith(f" on {socket.gethostname()}")
    return refusal
