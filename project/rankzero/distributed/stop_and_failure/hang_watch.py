"""This rank's part in noticing a hang: it reports its status, and records its stacks. Does not import torch."""

import socket
import threading
import time
from collections.abc import Callable

from rankzero.distributed.stop_and_failure.activity import Activity
from rankzero.distributed.stop_and_failure.detector import HangDetector
from rankzero.distributed.stop_and_failure.heartbeat import Heartbeat
from rankzero.distributed.stop_and_failure.server import HEARTBEAT_SECONDS, Message
from rankzero.messages import print_error

ON_ABORT_SECONDS = 12.0
"""How long a function that records a failure or a hang may take, including a save in progress."""


class HangWatch:
    """Reports what the main thread is doing, and acts on a hang.

    Args:
        terminate: Ends this process, given the cause; called for a hang of a run with a single process.

    Attributes:
        activity: What the main thread is doing.
        on_hang: Called with the description of a hang, in a separate thread, on every rank.
        is_single_process: Whether the run has no other process, and thus no control server that notices a hang.
    """

    def __init__(self, terminate: Callable[[str], None]) -> None:
        self.activity = Activity()
        self.on_hang: Callable[[str], None] = lambda description: None
        self.is_single_process = False
        self._terminate = terminate
        self._heartbeat: Heartbeat | None = None
        self._stops_run = True
        self._thread: threading.Thread | None = None

    def start(
        self, timeout: float, stops_run: bool, collective_in_flight: Callable[[], tuple[int, str] | None]
    ) -> None:
        """Begins to report the status of this rank. All ranks must call.

        Args:
            timeout: `--hang_timeout`: seconds without progress after which a run hangs.
            stops_run: Whether a hang is a failure, which ends all ranks; otherwise it is only reported.
            collective_in_flight: See `Heartbeat`.
        """
        self._heartbeat, self._stops_run = Heartbeat(self.activity, timeout, collective_in_flight), stops_run
        if self.is_single_process and self._thread is None:
            self._thread = threading.Thread(target=self._watch_single_process, name="heartbeat", daemon=True)
            self._thread.start()

    def message(self) -> Message | None:
        """Returns the message to send to rank zero; None before `start`."""
        return {"status": self._heartbeat.status()} if self._heartbeat else None

    def record(self, description: str) -> None:
        """Records a hang in the log of this rank."""
        call_in_thread(self.on_hang, description)

    def ends_run(self, description: str) -> bool:
        """Returns whether a hang ends the run; prints it if not. Only rank zero calls this."""
        if not self._stops_run:
            print_error(f"{description}; the run continues (--hang_action report)")
        return self._stops_run

    def _watch_single_process(self) -> None:
        detector = HangDetector([socket.gethostname()])
        while True:
            time.sleep(HEARTBEAT_SECONDS)
            assert self._heartbeat is not None
            detector.update(0, self._heartbeat.status())
            if description := detector.new_hang():
                self.record(description)
                if self.ends_run(description):
                    self._terminate(description)


def call_in_thread(function: Callable[[str], None], text: str) -> None:
    """Calls a function that may wait for the disk; waits at most `ON_ABORT_SECONDS` for it."""
    thread = threading.Thread(target=function, args=(text,), daemon=True)
    thread.start()
    thread.join(ON_ABORT_SECONDS)
