"""Coordinates the processes of a run: they exchange objects, start only if all of them can, and exit together."""

import json
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from hashlib import sha256
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from typing_extensions import Self

from rankzero.distributed import network
from rankzero.distributed.environments.launch import RequestedWorld
from rankzero.distributed.environments.validate import check_world
from rankzero.distributed.process_group import destroy_process_group, init_process_group
from rankzero.distributed.rendezvous.client import RendezvousResult
from rankzero.distributed.rendezvous.peers import Peer, assign_ranks
from rankzero.distributed.rendezvous.server import Progress
from rankzero.distributed.stop_and_failure.channel import ControlChannel
from rankzero.messages import AnotherRankFailed, CannotStart, LeftEarlyError, Stopped, is_peer_failure, mark_reported

T = TypeVar("T")

_STOPPED = "rankzero was stopped"

CAUSE_SECONDS = 4.0
"""How long a rank that has lost contact waits for the control channel to deliver the cause."""

_POLL_SECONDS = 0.02
_EXIT_SECONDS = 3.0

WORK_SECONDS = 1800.0
"""Minimum time that a rank may take to build its data and model while the other ranks wait."""


class Coordinator:
    """Exchanges objects between the processes of a run through a `torch.distributed.Store`.

    A context manager that all ranks must enter.

    Args:
        rendezvous_result: The processes that the rendezvous has found; this process alone under torchrun.
        requested: The requested processes.

    Attributes:
        launch: The position of this process among all processes, with the values that the launcher did not provide.
        members: All processes, by rank.
        hosts: Host of each rank.
        control_channel: The control channel of this rank.

    Raises:
        RequestError: The launched processes are not the requested ones.
    """

    def __init__(self, rendezvous_result: RendezvousResult, requested: RequestedWorld) -> None:
        self.timeout = max(requested.start_timeout, WORK_SECONDS)
        self.launch, self.members = rendezvous_result.launch, rendezvous_result.members
        self._store: Store | None = None
        self._agent_store: Store | None = None
        self._exchanges = 0
        self._serves_store = rendezvous_result.listener is not None
        if self.launch.world_size == 1:
            if self.launch.uses_agent_store:
                self._connect_to_store(rendezvous_result.ip)
                self._check_not_stopped()
            self.control_channel = ControlChannel(self.launch, self.members, self.all_gather_object)
            self.hosts = [member.host for member in self.members]
            return
        ip, listener = rendezvous_result.ip, rendezvous_result.listener
        self._store = self._serve_store(ip, listener) if listener else self._connect_to_store(ip)
        if self.launch.uses_agent_store:
            self._check_not_stopped()
            this_peer = self.members[0]
            peers = [Peer(**peer) for peer in self.all_gather_object(this_peer._asdict())]
            self.launch, self.members = assign_ranks(self.launch, this_peer, peers)
            check_world(requested, self.launch)
        self.hosts = [member.host for member in self.members]
        # Until the control channel exists, a killed rank goes unnoticed. So wait for `start_timeout` at most.
        gather_until_start_timeout = partial(self.all_gather_object, seconds=requested.start_timeout)
        self.control_channel = ControlChannel(
            self.launch, self.members, gather_until_start_timeout, requested.interface
        )
        network.use_interface(requested.interface, self._find_interface())

    def _check_not_stopped(self) -> None:
        if self._agent_store and self._agent_store.check([_STOPPED]):
            raise Stopped("torchrun restarted a run that was stopped at a safe point; it stays stopped")

    def _serve_store(self, ip: str, listener: Any) -> Store:
        """Returns the store, served on the socket of the rendezvous."""
        port, timeout, fd = self.launch.port, timedelta(seconds=self.timeout), listener.detach()
        return TCPStore(ip, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=fd)

    def _connect_to_store(self, ip: str) -> Store:
        timeout = timedelta(seconds=self.timeout)
        store = TCPStore(ip, self.launch.port, is_master=False, timeout=timeout, wait_for_workers=False)
        if not self.launch.uses_agent_store:
            return store
        # torchrun's store outlives its workers. The prefix hides the keys of earlier attempts, except `_STOPPED`.
        self._agent_store = store
        return PrefixStore(f"rankzero {self.launch.world_id}", store)

    def _find_interface(self) -> str | None:
        """Returns the interface that reaches the other machines; None if it is unknown. All ranks must call."""
        assert self.launch.rank is not None
        if self.launch.num_nodes == 1:
            return "lo"
        address = network.resolve(self.launch.address)[0]
        node_and_source = (self.launch.node_rank, network.source_address(address))
        other_addresses = [
            source
            for node, source in self.all_gather_object(node_and_source)
            if node != self.launch.node_rank and source
        ]
        target = (
            other_addresses[0] if self.launch.node_rank == self.members[0].node_rank and other_addresses else address
        )
        source = network.source_address(target)
        return network.interface_of(source) if source else None

    def all_gather_object(self, value: Any, seconds: float | None = None) -> list[Any]:
        """Gathers one JSON-serializable value from every rank and returns all values, by rank. All ranks must call.

        Args:
            value: The value of this rank.
            seconds: How long to wait for each rank; by default, as long as a rank may take to build its data and model.

        Raises:
            AnotherRankFailed: A rank did not provide its value in time.
        """
        if self._store is None:
            return [json.loads(json.dumps(value))]
        self._exchanges += 1
        key, size = f"exchange {self._exchanges}", self.launch.world_size
        self._store.set(f"{key} {self.launch.rank}", json.dumps(value))
        return [json.loads(self._wait_for(f"{key} {rank}", rank, seconds or self.timeout)) for rank in range(size)]

    def _wait_for(self, key: str, rank: int, seconds: float) -> bytes:
        assert self._store is not None
        deadline, progress = time.monotonic() + seconds, Progress(seconds)
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                raise AnotherRankFailed(f"rank {rank} did not respond within {seconds:g} s")
            if self.launch.rank == 0:
                progress.print_if_due(lambda: f"rank {rank} on {self.members[rank].host}")
            time.sleep(_POLL_SECONDS)
        return bytes(self._store.get(key))

    def run_on_all_ranks(self, work: Callable[[], T]) -> T:
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
        own_outcome = (
            {"refused": str(error)} if isinstance(error, CannotStart) else {"failed": repr(error)} if error else {}
        )
        outcomes = self.all_gather_object(own_outcome)
        if error is not None and not isinstance(error, CannotStart):
            raise error
        refusals = [outcome.get("refused") for outcome in outcomes]
        refusing_rank = next((rank for rank, refusal in enumerate(refusals) if refusal), None)
        if refusing_rank is not None:
            raise self._refusal(refusals, refusing_rank, error)
        failed_rank = next((rank for rank, outcome in enumerate(outcomes) if "failed" in outcome), None)
        if failed_rank is not None:
            error_text, host = outcomes[failed_rank]["failed"], self.members[failed_rank].host
            raise AnotherRankFailed(f"rank {failed_rank} on {host} failed: {error_text}")
        return result  # type: ignore[return-value]

    def run_on_rank_zero(self, work: Callable[[], T]) -> T:
        """Runs `work` on rank zero and returns its JSON-serializable result on all ranks. All ranks must call.

        Raises:
            CannotStart: On every rank, if `work` raised it.
            AnotherRankFailed: On the other ranks, if `work` raised any other exception.
        """
        result: T = self.all_gather_object(self.run_on_all_ranks(lambda: work() if self.launch.rank == 0 else None))[0]
        return result

    def _refusal(self, refusals: Sequence[str | None], refusing_rank: int, own_error: Exception | None) -> CannotStart:
        """Returns the refusal that this rank raises: its own, or the first one by rank.

        Of several ranks with the same refusal, the lowest reports it.
        """
        refusal = own_error if isinstance(own_error, CannotStart) else CannotStart(refusals[refusing_rank])
        refusal.reported_elsewhere = own_error is None or refusals.index(str(own_error)) != self.launch.rank
        if not refusal.reported_elsewhere and not all(refusals):
            return refusal_reported_here(refusal, f"rank {self.launch.rank} on {socket.gethostname()}")
        return refusal

    def barrier_before_exit(self) -> None:
        """Waits for all ranks before a stopped run exits. All ranks must call.

        Launchers terminate all processes as soon as one has exited. torchrun treats every exit code except 0 as a
        failure, and restarts all processes if `--max-restarts` allows it. So torchrun's store records the stop.
        """
        # When a machine joins an elastic torchrun, its workers are signaled and restarted: this is no stop to record.
        if self._agent_store and not self.launch.elastic:
            self._agent_store.set(_STOPPED, "")
        self.all_gather_object(None)

    def init_process_group(self, backend: str, device: torch.device, timeout: timedelta | None) -> None:
        """Creates torch's process group if none exists. All ranks must call."""
        if torch.distributed.is_initialized():
            return
        assert self._store is not None
        init_process_group(self._store, self.launch, backend, device, timeout)

    def __enter__(self) -> Self:
        self.control_channel.watch_for_early_exit()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_refused = isinstance(error, CannotStart)
        try:
            if isinstance(error, CannotStart) and error.reported_elsewhere is None:
                error.reported_elsewhere = self._is_reported_elsewhere(str(error))
            elif isinstance(error, Exception) and is_peer_failure(error) and self._any_rank_refused():
                is_refused = True
                raise refusal_reported_elsewhere() from None
            elif error is not None and not is_refused:
                self._report_failure(error)
        finally:
            has_left_group = destroy_process_group(after_error=error is not None)
            if error and is_refused and not has_left_group:
                self._report_failure(error)  # the other ranks may be waiting in a collective
            if is_refused:
                self._wait_for_ranks_to_leave()
            self.control_channel.close()

    def _report_failure(self, error: BaseException) -> None:
        """Reports this rank's failure, so that the other ranks exit before the process group is destroyed.

        This method uses no collective, since the other ranks may be anywhere in the program.
        """
        cause = f"rank {self.launch.rank} on {socket.gethostname()} failed: {error!r}"
        reported_cause = is_peer_failure(error) and self.control_channel.failure_cause(CAUSE_SECONDS)
        if reported_cause or not self.control_channel.report_failure(cause):
            mark_reported(error)

    def _is_reported_elsewhere(self, text: str) -> bool:
        """Returns whether another rank reports this text; if not, claims the report for this rank."""
        if self._store is None:
            return False
        try:
            self._store.set("refused", "")
            return bool(self._store.add(f"refusal {sha256(text.encode()).hexdigest()}", 1) > 1)
        except RuntimeError:
            return True  # the rank that serves the store has exited, and has reported its error

    def _any_rank_refused(self) -> bool:
        try:
            return self._store is not None and bool(self._store.check(["refused"]))
        except RuntimeError:
            return False

    def _wait_for_ranks_to_leave(self) -> None:
        """Makes the rank that serves the store exit last, so that the other ranks can still read from it."""
        if self._store is None or self.launch.uses_agent_store:
            return
        deadline = time.monotonic() + _EXIT_SECONDS
        try:
            left_count = self._store.add("left", 1)
            while self._serves_store and left_count < self.launch.world_size and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
                left_count = self._store.add("left", 0)
        except RuntimeError:
            pass  # the rank that serves the store has exited


def refusal_reported_here(refusal: CannotStart, rank_and_host: str) -> CannotStart:
    """Returns a copy of a refusal that names the rank that it concerns, for this rank to report."""
    named = CannotStart(f"  {rank_and_host}:\n{refusal}")
    named.reported_elsewhere = False
    return named


def refusal_reported_elsewhere() -> CannotStart:
    """Returns a refusal that another rank reports."""
    refusal = CannotStart("another rank cannot start")
    refusal.reported_elsewhere = True
    return refusal
