"""This rank's part in monitoring: observes the main thread, reports its status, and records its stacks at a hang."""

import socket
import threading
from collections.abc import Callable
from time import monotonic
from types import FrameType
from typing import NamedTuple

from rankzero.distributed.monitoring.activity import (
    BACKWARD,
    CHECKPOINT,
    DATA,
    END,
    SANITY_CHECK,
    START,
    VALIDATION,
    Activity,
)
from rankzero.distributed.monitoring.hangs import (
    BLOCKED,
    PATIENCE,
    HangDetector,
    PauseDetector,
    Status,
    silence_seconds,
)
from rankzero.distributed.monitoring.stacks import (
    current_user_position,
    is_compiling,
    is_in_debugger,
    main_thread_frames,
    waiting_function,
    worker_position,
)
from rankzero.distributed.timers import TIMERS
from rankzero.messages import print_error

DETAIL_SECONDS = 4.0
"""Age of a phase after which a report contains details; determining them takes about a millisecond.

With a short `--hang_timeout`, half of it applies.
"""


class InFlight(NamedTuple):
    """What this rank has begun and not completed.

    Args:
        number: Number of the oldest collective among those of its process group, from 1; 0 without one.
        collective: Its description, such as `all_reduce of 421,642 values`; empty if it waits for no other rank.
        awaits_gpu: Whether the GPU still works on something that needs no other rank.
    """

    number: int = 0
    collective: str = ""
    awaits_gpu: bool = False


CollectiveInFlight = Callable[[], InFlight]
"""Returns what this rank has in flight. Raises NotImplementedError if torch does not record collectives."""


class Heartbeat:
    """Observes the activity of this rank from another thread."""

    def __init__(self, activity: Activity, timeout: float, collective_in_flight: CollectiveInFlight) -> None:
        self.activity, self.timeout, self.collective_in_flight = activity, timeout, collective_in_flight
        self._pauses = PauseDetector()
        self._longest = 0.0
        self._last_visit, self._last_age = activity.since, 0.0
        self._waits_in, self._waits_since = "", activity.since

    @property
    def limit(self) -> float:
        """Seconds that a phase may take: `timeout` plus the longest phase that has ended so far."""
        return self.timeout + self._longest

    def status(self) -> Status | None:
        """Returns the status of this rank; None after training, and at first while Lightning prepares it."""
        activity, resumed_at = self.activity, self._pauses.resumed_at()
        phase, since, now = activity.phase, activity.since, monotonic()  # in this order, see `Activity.enter`
        if since != self._last_visit:
            self._longest = max(self._longest, self._last_age)
        self._last_visit, self._last_age = since, max(0.0, now - max(since, resumed_at))
        if phase in (START, END):
            age, self._last_age = self._last_age, 0.0
            return self._while_starting(now) if phase == START and age >= DETAIL_SECONDS else None
        may_take_longer = activity.batches < 2 or phase in (SANITY_CHECK, VALIDATION)
        needs_details = self._last_age >= min(DETAIL_SECONDS, self.timeout / 2)
        gradient = activity.first_gradient
        status = Status(activity.step, phase, self._last_age, self.limit, may_take_longer, first_gradient=gradient)
        if not needs_details:
            return status
        try:
            return self._with_details(status)
        except Exception:  # an unexpected state of a process or of torch; the thread must keep reporting
            return status

    def _while_starting(self, now: float) -> Status:
        frames = main_thread_frames()
        waits_in = self._collective(START, frames).collective
        if waits_in != self._waits_in:
            self._waits_in, self._waits_since = waits_in, now
        age, position = now - self._waits_since, current_user_position(frames)
        return Status(0, START, age, self.timeout, waits_in=waits_in, position=position)

    def _with_details(self, status: Status) -> Status:
        frames = main_thread_frames()
        limit: float | None = self.limit
        if is_in_debugger(frames):
            limit = None
        elif status.phase == CHECKPOINT or is_compiling(frames):
            status, limit = status._replace(may_take_longer=False), self.limit * PATIENCE
        sequence, waits_in, awaits_gpu = self._collective(status.phase, frames)
        position = current_user_position(frames)
        if status.phase == DATA and not position and status.is_overdue(0.5):
            position = worker_position()
        if awaits_gpu and not waits_in:
            position += f"{', where ' * bool(position)}the CPU waits for the GPU"
        return status._replace(limit=limit, waits_in=waits_in, sequence=sequence, position=position)

    def _collective(self, phase: str, frames: list[FrameType]) -> InFlight:
        """Returns what this rank has in flight, with the place in which the main thread waits for other ranks."""
        try:
            found = self.collective_in_flight()
        except NotImplementedError:
            found = InFlight(collective="a collective" * (phase == BACKWARD))
        except Exception:  # such as an error of the GPU, which the main thread raises too
            found = InFlight()
        return found if found.number or found.collective else found._replace(collective=waiting_function(frames))


class Monitor:
    """Reports what the main thread is doing, and acts on hangs and slow ranks.

    Args:
        terminate: Ends this process, given the cause; called for a hang of a run with a single process.

    Attributes:
        activity: What the main thread is doing.
        on_hang: Called with the description of a hang, in a separate thread, on every rank.
        slow_ranks: Rank -> description of each slow rank; only on rank zero.
        recorded: Description of the last hang that has been recorded.
        rank_zero_place: Phase and step of rank zero's last report; empty if it was not training.
        stops_run: Whether a hang is a failure, which ends all ranks.
        is_single_process: Whether the run has no other process, and thus no control server that notices a hang.
    """

    def __init__(self, terminate: Callable[[str], None]) -> None:
        self.activity = Activity()
        self.on_hang: Callable[[str], None] = lambda description: None
        self.is_single_process, self.stops_run = False, True
        self.slow_ranks: dict[int, str] = {}
        self._terminate = terminate
        self._heartbeat: Heartbeat | None = None
        self._is_over = threading.Event()
        self.recorded = self.rank_zero_place = ""
        self._pauses = PauseDetector()
        self._heard_at, self._is_silence_reported = monotonic(), False

    def start(self, timeout: float, stops_run: bool, collective_in_flight: CollectiveInFlight) -> None:
        """Begins to report the status of this rank. All ranks must call.

        Args:
            timeout: `--hang_timeout`: seconds without progress after which a run hangs.
            stops_run: Whether a hang is a failure, which ends all ranks; otherwise it is only reported.
            collective_in_flight: See `CollectiveInFlight`.
        """
        self.activity.reset()
        self.slow_ranks.clear()
        self._heartbeat, self.stops_run = Heartbeat(self.activity, timeout, collective_in_flight), stops_run
        if self.is_single_process:
            self._is_over = threading.Event()
            threading.Thread(
                target=self._watch_single_process, args=(self._heartbeat, self._is_over), name="heartbeat", daemon=True
            ).start()

    def stop(self) -> None:
        """Ends the reports that `start` has begun."""
        self._heartbeat, self.on_hang = None, lambda description: None
        self._is_over.set()

    def status(self) -> Status | None:
        """Returns the status of this rank; None outside training."""
        heartbeat = self._heartbeat
        return heartbeat.status() if heartbeat else None

    def record(self, description: str) -> None:
        """Records a hang and the stacks of this rank in its log, in a thread, because the disk may be the cause."""
        self.recorded = description
        threading.Thread(target=self.on_hang, args=(description,), daemon=True).start()

    def ends_run(self, description: str) -> bool:
        """Returns whether a hang ends the run; prints it if not. Only one rank calls this."""
        if not self.stops_run:
            print_hang(description)
        return self.stops_run

    def new_silence(self, has_received: bool, interval: float) -> str:
        """Returns a description if rank zero has sent nothing for too long during training, once; else empty.

        Rank zero notices all other hangs, but cannot notice that its own interpreter is blocked. Must be called with
        every heartbeat.

        Args:
            has_received: Whether rank zero has sent anything since the last call.
            interval: Seconds between two messages of rank zero.
        """
        now, resumed_at, heartbeat = monotonic(), self._pauses.resumed_at(), self._heartbeat
        if has_received or heartbeat is None or self.activity.place == "":
            self._heard_at, self._is_silence_reported = now, False
            return ""
        seconds = now - max(self._heard_at, resumed_at)
        if self._is_silence_reported or seconds <= max(heartbeat.limit, silence_seconds(interval)):
            return ""
        self._is_silence_reported = True
        since = f", since {self.rank_zero_place}" if self.rank_zero_place else ""
        return f"has not reported for {seconds:.0f} s{since}: {BLOCKED}"

    def _watch_single_process(self, heartbeat: Heartbeat, is_over: threading.Event) -> None:
        detector = HangDetector([socket.gethostname()], TIMERS.silence)
        while not is_over.wait(TIMERS.heartbeat):
            detector.update(0, heartbeat.status())
            if description := detector.new_hang():
                self.record(description)
                if self.ends_run(description):
                    self._terminate(description)


def print_hang(description: str) -> None:
    """Prints a hang that does not end the run."""
    print_error(f"{description}; the run continues (--hang_action report)")


def call_in_thread(function: Callable[[str], None], text: str) -> None:
    """Calls a function that may wait for the disk; waits at most `TIMERS.record` for it."""
    thread = threading.Thread(target=function, args=(text,), daemon=True)
    thread.start()
    thread.join(TIMERS.record)
