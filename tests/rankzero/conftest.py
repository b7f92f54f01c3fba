"""Scripts that use the Trainer, in this process."""

import atexit
import sys

import pytest

from running import as_before


@pytest.fixture
def script(here, monkeypatch):
    """A process in which no Trainer has been built, in a folder of its own."""
    from rankzero.distributed import session
    from rankzero.messages import spell_with

    monkeypatch.setattr(session.Session, "current", None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with as_before():
        yield here
    session._leave_others(None)
    spell_with(None)
    atexit.unregister(session._leave)
