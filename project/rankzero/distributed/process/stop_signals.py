"""Receives the signals that request a stop of the run.

Python runs a signal handler only in the main thread, and not while that thread waits in a collective. So the handlers
here do nothing: the interpreter writes the number of each signal to a socket (`signal.set_wakeup_fd`), and a thread
reads it. The thread calls the control channel (`rankzero.distributed.stop_and_failure`), through which all ranks agree
on the step after which they stop.
"""

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rankzero.distributed.process.exit_reports import ORIGINAL_EXIT, report_exit
from rankzero.distributed.timers import TIMERS
from rankzero.messages import Stopped


def is_interactive() -> bool:
    """Returns whether a person types the program: in a notebook, at the prompt of an interpreter, or in `python -i`."""
    return hasattr(sys, "ps1") or bool(sys.flags.inspect)


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""SIGHUP arrives when the terminal is closed or its ssh connection is lost; a process under `nohup` ignores it."""


class StopSignals:
    """Reads the stop signals of this process and passes them to one subscriber."""

    def __init__(self) -> None:
        self.received: str | None = None
        """Name of the first stop signal; None before it arrives."""
        self.received_at = 0.0
        """Arrival time of the first stop signal, by `time.monotonic`."""
        self._callback: Callable[[signal.Signals], None] | None = None
        self._pending: list[signal.Signals] = []
        self._lock = threading.Lock()
        self._write_end: socket.socket | None = None
        self._previous_handlers: dict[signal.Signals, Any] = {}

    def install(self) -> bool:
        """Makes the signals request a stop, instead of ending this process at once. Call in the main thread.

        Returns:
            False if they did so already.
        """
        if self._write_end:
            return False
        read_end, self._write_end = socket.socketpair()
        self._write_end.setblocking(False)
        threading.Thread(target=self._read_signals, args=(read_end,), name="signals", daemon=True).start()
        signal.set_wakeup_fd(self._write_end.fileno(), warn_on_full_buffer=False)
        handlers = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
        if handlers[signal.SIGHUP] is not signal.SIG_DFL:
            del handlers[signal.SIGHUP]
        self._previous_handlers = handlers
        for signum in handlers:
            signal.signal(signum, _handle)
        os.register_at_fork(after_in_child=self._restore)
        return True

    def close(self) -> None:
        """Restores the previous signal handlers. Call in the main thread."""
        self._restore()
        if self._write_end:
            self._write_end.close()
        self._write_end = self._callback = self.received = None
        self._pending = []

    def subscribe(self, callback: Callable[[signal.Signals], None]) -> None:
        """Calls `callback` with every stop signal, including earlier ones; calls may come from another thread."""
        with self._lock:
            self._callback, pending, self._pending = callback, self._pending, []
        for signum in pending:
            callback(signum)

    @contextmanager
    def subscribed(self, callback: Callable[[signal.Signals], None]) -> Iterator[None]:
        """Subscribes within a `with` block. Outside the main thread, the handlers must already be installed."""
        has_installed = threading.current_thread() is threading.main_thread() and self.install()
        self.subscribe(callback)
        try:
            yield
        finally:
            if has_installed:
                self.close()

    def check_stop_request(self) -> None:
        """Ends the wait for other ranks after a stop request; called repeatedly before the run begins.

        A short delay lets the missing ranks connect, so that all ranks stop together.

        Raises:
            Stopped: `TIMERS.stop_grace` have passed since the request.
        """
        if self.received and time.monotonic() - self.received_at > TIMERS.stop_grace:
            raise Stopped(f"{self.received}: stopped before the rendezvous was complete; nothing was started")

    def _read_signals(self, read_end: socket.socket) -> None:
        pressed_at = 0.0
        with read_end:
            while numbers := read_end.recv(64):
                for number in numbers:
                    now = time.monotonic()
                    if number == signal.SIGINT:
                        if pressed_at and now - pressed_at > TIMERS.same_press and not is_interactive():
                            report_exit()
                            ORIGINAL_EXIT(128 + signal.SIGINT)
                        pressed_at = pressed_at or now
                    if number == signal.SIGHUP:
                        _discard_output_to_closed_terminal()
                    if number in self._previous_handlers:
                        self._record(signal.Signals(number), now)

    def _record(self, signum: signal.Signals, now: float) -> None:
        with self._lock:
            if self.received is None:
                self.received, self.received_at = signum.name, now
            callback = self._callback
            if callback is None:
                self._pending.append(signum)
        if callback:
            callback(signum)

    def _restore(self) -> None:
        """Restores the previous handlers; also called in forked processes, which must not request a stop."""
        signal.set_wakeup_fd(-1)
        for signum, handler in self._previous_handlers.items():
            if signal.getsignal(signum) is _handle:
                signal.signal(signum, handler)
        self._previous_handlers = {}


def _discard_output_to_closed_terminal() -> None:
    """Discards output that would raise an error: to a closed terminal, or to a program that ended with the terminal."""
    time.sleep(TIMERS.poll)  # such a program receives the signal at the same time
    for descriptor in (1, 2):
        poll = select.poll()
        poll.register(descriptor, 0)  # reports errors only
        if poll.poll(0):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def _handle(signum: int, frame: FrameType | None) -> None:
    """Does nothing: the signal's number has been written to the socket.

    Raises:
        KeyboardInterrupt: In an interactive program, SIGINT has arrived a second time.
    """
    waited = time.monotonic() - SIGNALS.received_at
    if signum == signal.SIGINT and SIGNALS.received and waited > TIMERS.same_press and is_interactive():
        raise KeyboardInterrupt


SIGNALS = StopSignals()
"""The stop signals of this process."""
