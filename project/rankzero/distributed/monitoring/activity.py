"""What this rank's main thread is doing: its step, its phase, and since when."""

import threading
from collections.abc import Callable
from time import monotonic

START = "start"
"""Lightning prepares data and model."""
DATA = "data wait"
FORWARD = "forward"
BACKWARD = "backward"
OPTIMIZER = "optimizer"
HOOK = "hook"
SANITY_CHECK = "the sanity check before training"
VALIDATION = "validation"
CHECKPOINT = "checkpoint"
END = "end"

PHASES = (START, DATA, FORWARD, BACKWARD, OPTIMIZER, HOOK, SANITY_CHECK, VALIDATION, CHECKPOINT, END)

UNMONITORED = (START, END)
"""Phases in which a rank is not part of a training step; other time limits apply to them."""


def place_of_step(phase: str, step: int) -> str:
    """Returns a phase with its step, such as `data wait at step 812`; the sanity check has no step."""
    return phase if phase == SANITY_CHECK else f"{phase} at step {step}"


class Activity:
    """Step and phase of a rank. The main thread updates it, other threads read it.

    An update costs about 0.2 us and needs no lock: a reader may see the old phase with the new time for an instant.

    Attributes:
        phase: The phase that the main thread is in.
        since: Time at which it entered the phase, in seconds on the clock of `time.monotonic`.
        step: Number of optimizer steps that were complete when the last batch or the last validation began.
        batch_began: Time at which the last batch began, on the same clock.
        first_gradient: Seconds from the start of a step to its first gradient, as a median; 0 if unknown.
        batches: Number of batches that have begun.
        listeners: Called with each phase that the main thread enters.
        seconds: Phase -> seconds that the main thread has spent in it, without the phase that it is in.
    """

    __slots__ = ("_lock", "batch_began", "batches", "first_gradient", "listeners", "phase", "seconds", "since", "step")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Returns to the state before training."""
        self.phase, self.step, self.batches, self.first_gradient = START, 0, 0, 0.0
        self.listeners: tuple[Callable[[str], None], ...] = ()
        self._lock = threading.Lock()  # other threads add listeners too
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.since = self.batch_began = monotonic()

    def begin_batch(self, step: int) -> None:
        """Records that the main thread waits for the next batch, after `step` completed optimizer steps."""
        now = monotonic()
        self.seconds[self.phase] += now - self.since
        self.since = self.batch_began = now
        self.phase, self.step = DATA, step
        self.batches += 1
        if self.listeners:  # faster than a loop over an empty tuple
            for listener in self.listeners:
                listener(DATA)

    def enter(self, phase: str) -> None:
        """Records that the main thread enters a phase, or begins the next part of the same one."""
        now = monotonic()
        self.seconds[self.phase] += now - self.since
        self.since = now  # first, so that no other thread sees the new phase with the age of the old one
        self.phase = phase
        if self.listeners:
            for listener in self.listeners:
                listener(phase)

    def begin_validation(self, step: int) -> None:
        """Records that the main thread validates, after `step` completed optimizer steps."""
        self.step = step
        self.enter(VALIDATION)

    def listen(self, listener: Callable[[str], None]) -> None:
        """Adds a listener, unless it listens already."""
        with self._lock:
            if listener not in self.listeners:
                self.listeners = (*self.listeners, listener)

    def stop_listening(self, listener: Callable[[str], None]) -> None:
        """Removes a listener, if it listens; a listener may remove itself."""
        with self._lock:
            self.listeners = tuple(other for other in self.listeners if other != listener)

    @property
    def place(self) -> str:
        """Phase and step, such as `data wait at step 812`; empty outside training."""
        return "" if self.phase in UNMONITORED else place_of_step(self.phase, self.step)
