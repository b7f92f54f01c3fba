"""Fixtures for tests in several folders."""

import atexit
import sys

import pytest

from rankzero.distributed import session
from rankzero.distributed.session import Session
from rankzero.messages import spell_with
from running import as_before


@pytest.fixture
def script(here, monkeypatch):
    """An empty folder, in a process in which no Trainer has been built."""
    monkeypatch.setattr(Session, "current", None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with as_before():
        yield here
    session._leave_others(None)
    spell_with(None)
    atexit.unregister(session._leave)
