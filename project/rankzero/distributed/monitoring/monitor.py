"""This rank's part in monitoring: reports its status, and records its stacks if the run hangs.

Does not import torch.
"""

import socket
import threading
import time
from collections.abc import Callable

from rankzero.distributed.monitoring.activity import Activity
from rankzero.distributed.monitoring.detector import HangDetector
from rankzero.distributed.monitoring.diagnosis import BLOCKED
from rankzero.distributed.monitoring.heartbeat import CollectiveInFlight, Heartbeat
from rankzero.distributed.monitoring.status import PauseDetector, Status, silence_seconds
from rankzero.distributed.timers import TIMERS
from rankzero.messages import print_error


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
        self.is_single_process = False
        self.slow_ranks: dict[int, str] = {}
        self._terminate = terminate
        self._heartbeat: Heartbeat | None = None
        self.stops_run = True
        self._is_over = threading.Event()
        self.recorded = self.rank_zero_place = ""
        self._pauses = PauseDetector()
        self._heard_at = time.monotonic()
        self._is_silence_reported = False

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
        now, resumed_at, heartbeat = time.monotonic(), self._pauses.resumed_at(), self._heartbeat
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
