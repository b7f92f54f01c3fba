"""Background thread that writes checkpoints while training continues."""

import threading
from collections.abc import Callable


class BackgroundWriter:
    """Runs one task at a time, each in a new thread; the process does not exit before the task has ended."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def start(self, task: Callable[[], None]) -> None:
        """Starts `task` once the current task has ended. `task` has to report its own errors."""
        self.wait()
        self._thread = threading.Thread(target=task, name="rankzero-writer", daemon=False)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether a task is running."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Waits until no task is running; returns at once if a task itself calls this."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
            if self._thread is thread:  # no other thread has started the next task meanwhile
                self._thread = None
