"""Tells ranks that are between two collectives whether all other ranks are at the same point.

A rank at such a point waits. A thread of every other rank answers for it, since its main thread may be waiting in a
collective for the rank that asks.
"""

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from rankzero.distributed.connections.line_connection import Message
from rankzero.distributed.timers import TIMERS

TOPICS = ("stop", "end of data")


class Decision(NamedTuple):
    """The batch in which all ranks are at the point, else the next that no rank has begun; the ranks at the point."""

    batch: int
    ranks: list[int]


class Agreement:
    """Points of one kind that all ranks reach in the same batch, or not at all.

    Attributes:
        passed_in: Returns the last batch that this rank has begun if it has passed the point in a batch; else 0. It is
            called in a thread.
        on_question: Called in the receiving thread before this rank answers.
        asked_batch: The batch of the last question.
        decision: The last decision; None if there is none, or if it no longer applies.
    """

    def __init__(self, topic: str, send: Callable[[Message], None], check_failure: Callable[[], None]) -> None:
        self._topic, self._send, self._check_failure = topic, send, check_failure
        self.passed_in: Callable[[int], int] = lambda batch: 0
        self.on_question: Callable[[], None] = lambda: None
        self.decision: Decision | None = None
        self._number = self.asked_batch = 0
        self._is_decided = threading.Event()
        self._lock = threading.Lock()

    def reach(self, batch: int, keeps_decision: bool = False) -> Decision:
        """Waits at the point in a batch until rank zero has decided.

        Args:
            batch: The batch.
            keeps_decision: Whether a decision that still applies is returned instead.
        """
        with self._lock:  # a thread receives questions and decisions
            if keeps_decision and self.decision:
                return self.decision
            self._is_decided.clear()
            number = self._number
        self._send({"answer": [self._topic, number, True, batch]})
        return self.wait()

    def wait(self) -> Decision:
        """Waits for the decision about the last question."""
        while not self._is_decided.wait(TIMERS.slow_poll):
            self._check_failure()
        assert self.decision is not None
        return self.decision

    def handle_question(self, batch: int) -> None:
        """Has a thread answer once this rank has passed the point; at the point, its main thread answers."""
        with self._lock:
            self._is_decided.clear()
            self.asked_batch, number = batch, self._number
        self.on_question()
        threading.Thread(target=self._answer_when_passed, args=(batch, number), daemon=True).start()

    def handle_decision(self, batch: int, ranks: list[int]) -> None:
        with self._lock:
            self.decision = Decision(batch, ranks)
            self._number += 1
            self._is_decided.set()

    def _answer_when_passed(self, batch: int, number: int) -> None:
        while self._number == number and not (begun := self.passed_in(batch)):
            time.sleep(TIMERS.poll / 5)
        if self._number == number:  # the same answer, whether the next batch has begun or not
            self._send({"answer": [self._topic, number, False, max(begun, batch + 1)]})
