"""Exchanges values between all ranks through torch's store, before a process group exists."""

import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from rankzero.distributed.rendezvous.progress import Progress
from rankzero.distributed.timers import TIMERS
from rankzero.messages import AnotherRankFailed, RequestError


class StoreExchange:
    """Lets rank zero decide on something that depends on values of all ranks.

    An exchange takes three operations of the store per rank, and one more for all: each rank sets its value, rank zero
    reads all values at once and sets its answer, and each rank reads the answer.

    Args:
        store: The store that all ranks share.
        rank: Rank of this process.
        size: Number of processes.
        name_of: Returns the name of a rank for messages.
    """

    def __init__(self, store: Store, rank: int, size: int, name_of: Callable[[int], str]) -> None:
        self.store, self.rank, self.size, self.name_of = store, rank, size, name_of
        self._count = 0

    def decide(self, value: Any, choose: Callable[[list[Any]], Any], seconds: float, node: int | None = None) -> Any:
        """Sends a value to rank zero, which decides; returns the decision on all ranks. All ranks must call.

        Args:
            value: The JSON-serializable value of this rank.
            choose: Called on rank zero with the values of all ranks, by rank; returns a JSON-serializable decision.
            seconds: How long to wait for all ranks.
            node: If given, `choose` returns a list of decisions by node, of which this rank returns that of its node.

        Raises:
            RequestError: On all ranks, if `choose` raised it.
            AnotherRankFailed: A rank did not provide its value in time, or `choose` raised any other exception, which
                rank zero raises itself.
        """
        self._count += 1
        prefix = f"exchange {self._count}"
        self.store.set(f"{prefix} {self.rank}", json.dumps(value))
        if self.rank == 0:
            self._answer(prefix, choose, seconds, node is not None)
        self._wait([prefix], seconds if self.rank == 0 else seconds + TIMERS.late_answer, "rank 0")
        answer = json.loads(self.store.get(prefix))
        if answer.get("is_by_node"):
            return json.loads(self.store.get(f"{prefix} node {node}"))
        if "refused" in answer:
            raise RequestError(*answer["refused"])
        if "missing" in answer:
            raise AnotherRankFailed(answer["missing"])
        return answer["decision"]

    def _answer(self, prefix: str, choose: Callable[[list[Any]], Any], seconds: float, is_by_node: bool) -> None:
        keys = [f"{prefix} {rank}" for rank in range(self.size)]
        try:
            self._wait(keys, seconds, None)
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

    def _wait(self, keys: list[str], seconds: float, name: str | None) -> None:
        """Waits until all keys exist: those of all ranks if `name` is None, else the key that this rank sets."""
        deadline, progress = time.monotonic() + seconds, Progress(seconds)
        while True:
            remaining = deadline - time.monotonic()
            try:
                self.store.wait(keys, timedelta(seconds=min(max(remaining, 0.001), TIMERS.slow_poll)))
                return
            except torch.distributed.DistStoreError:
                if remaining <= 0:
                    missing = name or self._first_missing(keys)
                    raise AnotherRankFailed(f"{missing} did not respond within {seconds:g} s") from None
            if self.rank == 0:
                progress.print_if_due(lambda: self._first_missing(keys))

    def _first_missing(self, keys: Sequence[str]) -> str:
        """Returns the name of the first rank whose key does not exist, found by bisection."""
        first, last = 0, len(keys) - 1
        while first < last:
            middle = (first + last) // 2
            if self.store.check(list(keys[first : middle + 1])):
                first = middle + 1
            else:
                last = middle
        return self.name_of(first)
