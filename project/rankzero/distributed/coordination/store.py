"""Torch's store, through which all ranks exchange values, and find one another under torchrun."""

import json
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from rankzero.distributed.connections.key import Key
from rankzero.distributed.rendezvous.errors import SAME_KEY_ADVICE, describe_key_problem
from rankzero.distributed.rendezvous.progress import Progress
from rankzero.distributed.rendezvous.ranks import assign_ranks, node_views, read_view, world_of_rank_zero
from rankzero.distributed.timers import TIMERS
from rankzero.distributed.torch_inside import Store, TCPStore
from rankzero.distributed.world import Peer, World
from rankzero.messages import AnotherRankFailed, RequestError


def serve_store(ip: str, listener: socket.socket, timeout: float) -> TCPStore:
    """Returns the store, served on the socket of the rendezvous."""
    port, fd, limit = listener.getsockname()[1], listener.detach(), timedelta(seconds=timeout)
    return TCPStore(ip, port, is_master=True, timeout=limit, wait_for_workers=False, master_listen_fd=fd)


def connect_to_store(ip: str, port: int, timeout: float, server: str) -> TCPStore:
    """Returns a client of the store.

    The process that serves it has been listening since the rendezvous, but may import torch for a long time before it
    answers. If it no longer listens, it has ended.

    Raises:
        AnotherRankFailed: The process has ended, or does not answer in time.
    """
    deadline, seconds = time.monotonic() + timeout, TIMERS.store_attempt
    while True:
        try:
            limit = timedelta(seconds=seconds)
            store = TCPStore(ip, port, is_master=False, timeout=limit, wait_for_workers=False)
            store.set_timeout(timedelta(seconds=timeout))
            return store
        except torch.distributed.DistError:
            if _has_ended(ip, port):
                raise AnotherRankFailed(f"{server} has ended: nothing listens at {ip}:{port} any more") from None
            if time.monotonic() > deadline:
                raise AnotherRankFailed(f"{server} did not answer at {ip}:{port} within {timeout:g} s") from None
            # Each attempt leaves connections that wait until they are accepted, and their number is limited.
            seconds = min(2 * seconds, 6 * TIMERS.store_attempt)


def _has_ended(ip: str, port: int) -> bool:
    """Returns whether the port is closed; it is not if the queue of connections that wait to be accepted is full."""
    try:
        socket.create_connection((ip, port), timeout=TIMERS.attempt).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


class StoreExchange:
    """Lets rank zero decide on something that depends on values of all ranks.

    An exchange takes three operations of the store per rank, and one more for all: each rank sets its value, rank zero
    reads all values at once and sets its answer, and each rank reads the answer.

    Attributes:
        left_ranks: Returns the ranks that have ended their program; known to rank zero only.
    """

    def __init__(self, store: Store, rank: int, size: int, name_of: Callable[[int], str]) -> None:
        self.store, self.rank, self.size, self.name_of = store, rank, size, name_of
        self.left_ranks: Callable[[], set[int]] = set
        self._count = 0

    def decide(
        self,
        value: Any,
        choose: Callable[[list[Any]], Any],
        seconds: float,
        node: int | None = None,
        work: str = "starting",
    ) -> Any:
        """Sends a value to rank zero, which decides; returns the decision on all ranks. All ranks must call.

        Rank zero prints which rank is late, and rank 1 that rank zero is.

        Args:
            value: The JSON-serializable value of this rank.
            choose: Called on rank zero with the values of all ranks, by rank; returns a JSON-serializable decision.
            seconds: How long to wait for all ranks; infinite for no limit.
            node: If given, `choose` returns a list of decisions by node, of which this rank returns that of its node.
            work: What a late rank is doing, for messages.

        Raises:
            RequestError: On all ranks, if `choose` raised it.
            AnotherRankFailed: A rank did not provide its value in time, has ended its program, or is rank zero and
                raises any other exception of `choose` itself.
        """
        self._count += 1
        prefix = f"exchange {self._count}"
        keys = [f"{prefix} {rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], json.dumps(value))
        if self.rank == 0:
            self._answer(prefix, keys, choose, seconds, node is not None, work)
        self._wait([prefix], keys[:1], seconds if self.rank == 0 else seconds + TIMERS.late_answer, work)
        answer = json.loads(self.store.get(prefix))
        if answer.get("is_by_node"):
            return json.loads(self.store.get(f"{prefix} node {node}"))
        if "refused" in answer:
            raise RequestError(*answer["refused"])
        if "missing" in answer:
            raise AnotherRankFailed(answer["missing"])
        return answer["decision"]

    def _answer(
        self,
        prefix: str,
        keys: list[str],
        choose: Callable[[list[Any]], Any],
        seconds: float,
        is_by_node: bool,
        work: str,
    ) -> None:
        try:
            self._wait(keys, keys, seconds, work)
            decision = choose([json.loads(value) for value in self.store.multi_get(keys)])
            for node, part in enumerate(decision if is_by_node else ()):
                self.store.set(f"{prefix} node {node}", json.dumps(part))
            answer = json.dumps({"is_by_node": True} if is_by_node else {"decision": decision})
        except RequestError as error:
            answer = json.dumps({"refused": [*error.args]})
        except AnotherRankFailed as error:
            answer = json.dumps({"missing": str(error)})
        except Exception as error:
            self.store.set(prefix, json.dumps({"missing": f"{self.name_of(0)} failed: {error!r}"}))
            raise
        self.store.set(prefix, answer)

    def _wait(self, keys: list[str], values: list[str], seconds: float, work: str) -> None:
        """Waits until all keys exist."""
        deadline, progress = time.monotonic() + seconds, Progress(seconds)
        while True:
            remaining = deadline - time.monotonic()
            try:
                self.store.wait(keys, timedelta(seconds=min(max(remaining, 0.001), TIMERS.slow_poll)))
                return
            except torch.distributed.DistStoreError:
                if remaining <= 0:
                    late = self._first_missing(values) or 0
                    raise AnotherRankFailed(self._describe_timeout(late, work, seconds)) from None
            for rank in self.left_ranks() & set(range(len(values))):
                if not self.store.check([values[rank]]):
                    raise AnotherRankFailed(f"{self.name_of(rank)} has ended its program")
            if self.rank <= 1:
                progress.print_if_due(lambda: self._describe_late(values, work))

    def _describe_timeout(self, rank: int, work: str, seconds: float) -> str:
        advice = f"to wait longer, add --start_timeout {max(int(seconds), 1) * 4}"
        return f"{self.name_of(rank)} was still {work} after {seconds:g} s; {advice}"

    def _describe_late(self, values: list[str], work: str) -> str:
        late = self._first_missing(values)
        return "" if late is None else f"{self.name_of(late)} is {work}"

    def _first_missing(self, keys: Sequence[str]) -> int | None:
        """Returns the first rank whose key does not exist, found by bisection; None if all exist."""
        if self.store.check(list(keys)):
            return None
        first, last = 0, len(keys) - 1
        while first < last:
            middle = (first + last) // 2
            if self.store.check(list(keys[first : middle + 1])):
                first = middle + 1
            else:
                last = middle
        return first


def find_ranks_through_store(exchange: StoreExchange, known: World, key: Key, seconds: float) -> World:
    """Returns the world, whose processes describe themselves and compare their keys. All ranks must call.

    Raises:
        RequestError: The ranks do not share a key, and one of them has `RANKZERO_KEY`.
        AnotherRankFailed: A rank did not describe itself in time.
        ValueError: The description of a rank is malformed.
    """
    launch = known.launch
    this_peer = known.peers[known.rank]._replace(key_fingerprint=key.fingerprint(launch.world_id))
    own = {"peer": this_peer._asdict(), "is_explicit": key.is_explicit}
    assigned: list[Peer] = []

    def assign(ranks: list[Any]) -> list[Any]:
        peers = [peer for values in ranks if (peer := Peer.from_message(values["peer"]))]
        if len(peers) != len(ranks):
            raise ValueError("the description of a rank is malformed")
        assigned.extend(assign_ranks(peers))
        others = [peer for peer in peers if not peer.has_key_of(peers[0])]
        is_shared = bool(peers[0].key_fingerprint) and not others
        problem = "" if is_shared else describe_key_problem(key, peers[0], others)
        if problem and any(values["is_explicit"] for values in ranks):
            raise RequestError("the same RANKZERO_KEY on all ranks", problem, SAME_KEY_ADVICE)
        return [{**view, "key_problem": problem} for view in node_views(assigned)]

    view = exchange.decide(own, assign, seconds, node=launch.node_rank)
    world = world_of_rank_zero(launch, this_peer, assigned) if assigned else read_view(launch, this_peer, view)
    if world is None:
        raise AnotherRankFailed("rank 0 has sent a malformed list of the processes of this node")
    world.key_problem = str(view["key_problem"])
    return world
