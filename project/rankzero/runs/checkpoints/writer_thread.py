"""The thread that writes, so that training goes on meanwhile."""

import threading
from collections.abc import Callable


class BackgroundWriter:
    """Does one piece of work at a time in a thread that ends with it; the process does not end before it."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begins the work, as soon as what is under way is done. The work tells of its own errors."""
        self.wait()
        self._thread = threading.Thread(target=work, name="rankzero-writer", daemon=False)
        self._thread.start()

    def wait(self) -> None:
        """Waits until nothing is under way; the work itself may call this too."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
            if self._thread is thread:  # no other thread has waited and begun the next
                self._thread = None
