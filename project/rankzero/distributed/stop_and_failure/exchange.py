"""Exchanges through the control channel: all ranks send a value, and rank zero decides.

Rank zero's main thread decides; the thread of the control server receives the values.
"""

import json
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from rankzero.distributed.connections.line_connection import Message
from rankzero.distributed.timers import TIMERS, Progress
from rankzero.distributed.world import World
from rankzero.messages import AnotherRankFailed, RequestError


class Exchange:
    """Lets rank zero decide on something that depends on values of all ranks.

    Args:
        world: The known processes; on rank zero all.
        send: Sends a message of this rank to rank zero.
        send_all: Sends a message of rank zero to all ranks.
        check_failure: Called while this rank waits. Raises AnotherRankFailed after a failure.
    """

    def __init__(
        self,
        world: World,
        send: Callable[[Message], None],
        send_all: Callable[[Message], None],
        check_failure: Callable[[], None],
    ) -> None:
        self.world, self._send, self._send_all, self._check_failure = world, send, send_all, check_failure
        self._changed = threading.Condition()
        self.count = self._gathering = 0
        self._values: dict[int, dict[int, Any]] = {}
        self._outcomes: dict[int, Message] = {}
        self._left: set[int] = set()

    def decide(self, value: Any, choose: Callable[[list[Any]], Any], seconds: float, work: str) -> Any:
        """Sends a value to rank zero, which decides; returns the decision on all ranks, see `Coordinator.decide`.

        Rank zero prints which rank is late, and rank 1 that rank zero is. `seconds` is infinite for no limit.

        Raises:
            RequestError: On all ranks, if `choose` raised it.
            AnotherRankFailed: A rank did not provide its value in time, has ended its program, or is rank zero and
                raises any other exception of `choose` itself.
        """
        self.count += 1
        if self.world.rank != 0 and self.world.size > 1:
            self._send({"value": [self.count, value]})
            return self._wait_for_decision(self.count, seconds + TIMERS.late_answer, work)
        try:
            values = self._gather(self.count, json.loads(json.dumps(value)), seconds, work)
            decision = json.loads(json.dumps(choose(values)))
        except Exception as error:
            cause = str(error) if isinstance(error, AnotherRankFailed) else f"{self.world.name_of(0)} failed: {error!r}"
            outcome = {"refused": [*error.args]} if isinstance(error, RequestError) else {"missing": cause}
            self._send_all({"decided": [self.count, outcome]})
            raise
        self._send_all({"decided": [self.count, {"decision": decision}]})
        return decision

    def _gather(self, number: int, own_value: Any, seconds: float, work: str) -> list[Any]:
        """Returns the values of all ranks, by rank, on rank zero."""
        started, pause = time.monotonic(), min(TIMERS.slow_poll, seconds)
        progress, size = Progress(seconds), self.world.size
        with self._changed:
            values = self._values.setdefault(number, {})
            values[0] = own_value
        while True:
            with self._changed:
                self._changed.wait_for(lambda: len(values) == size or self._left - values.keys(), pause)
                if len(values) == size:
                    del self._values[number]
                    return [values[rank] for rank in range(size)]
                late = next(rank for rank in range(size) if rank not in values)
                left = min(self._left - values.keys(), default=None)
            if left is not None:
                raise AnotherRankFailed(f"{self.world.name_of(left)} has ended its program")
            self._check_failure()
            if time.monotonic() - started > seconds:
                raise AnotherRankFailed(self._describe_timeout(late, work, seconds))
            if self._gathering != number:
                self._gathering = number
                self._send_all({"gathering": number})
            progress.print_if_due(partial(self._describe_late, late, work))

    def _wait_for_decision(self, number: int, seconds: float, work: str) -> Any:
        """Returns rank zero's decision, on the other ranks."""
        deadline, progress = time.monotonic() + seconds, Progress(seconds - TIMERS.late_answer)
        while True:
            with self._changed:
                if number not in self._outcomes:
                    self._changed.wait(TIMERS.slow_poll)
                outcome = self._outcomes.pop(number, None)
            if outcome is not None:
                break
            if self._left:
                raise AnotherRankFailed(f"{self.world.name_of(0)} has ended its program")
            self._check_failure()
            if time.monotonic() > deadline:
                raise AnotherRankFailed(self._describe_timeout(0, work, seconds - TIMERS.late_answer))
            if self.world.rank == 1 and self._gathering != number:
                progress.print_if_due(partial(self._describe_late, 0, work))
        match outcome:
            case {"refused": [*arguments]}:
                raise RequestError(*arguments)
            case {"missing": str() as cause}:
                raise AnotherRankFailed(cause)
        return outcome["decision"]

    def _describe_late(self, rank: int, work: str) -> str:
        return f"{self.world.name_of(rank)} is {work}"

    def _describe_timeout(self, rank: int, work: str, seconds: float) -> str:
        advice = f"to wait longer, add --start_timeout {max(int(seconds), 1) * 4}"
        return f"{self.world.name_of(rank)} was still {work} after {seconds:g} s; {advice}"

    # Called in the threads that receive messages

    def receive_value(self, rank: int, number: int, value: Any) -> None:
        """Stores the value of a rank, on rank zero."""
        with self._changed:
            if number in (self.count, self.count + 1):  # a rank begins no exchange before the last one is decided
                values = self._values.setdefault(number, {})
                values[rank] = value
                if len(values) == self.world.size:
                    self._changed.notify()

    def receive(self, number: int, outcome: Message) -> None:
        """Stores rank zero's decision, on the other ranks."""
        if self.world.rank != 0:
            with self._changed:
                self._outcomes[number] = outcome
                self._changed.notify()

    def wait_longer(self, number: int) -> None:
        """Notes that rank zero waits for other ranks in an exchange."""
        self._gathering = number

    def leave(self, rank: int) -> None:
        """Notes that a rank has ended its program: on rank zero any rank, on the others rank zero."""
        with self._changed:
            self._left.add(rank)
            self._changed.notify()
