"""Fixtures for tests in several folders."""

import atexit
import sys

import pytest

from rankzero.distributed import session
from rankzero.distributed.session import Session
from rankzero.messages import set_spelling
from running import restore_process_state


@pytest.fixture
def script_folder(cwd, monkeypatch):
    """An empty folder, in a process in which no Trainer has been built."""
    monkeypatch.setattr(Session, "current", None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with restore_process_state():
        yield cwd
    session._close_coordinator(None)
    set_spelling(None)
    atexit.unregister(session._close_at_exit)
