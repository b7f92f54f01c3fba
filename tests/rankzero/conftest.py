"""Fixtures for tests in several folders."""

import atexit
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor

import pytest

from rankzero.distributed import session
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.session import Session
from rankzero.distributed.timers import TIMERS
from rankzero.messages import is_peer_failure, set_quiet, set_spelling
from running import as_rank, reserved_port, restore_process_state


@pytest.fixture
def scale_timers():
    """Returns a function that multiplies all durations of `TIMERS` by a factor until the test ends."""
    yield TIMERS.scale
    TIMERS.scale(1)


@pytest.fixture
def script_folder(cwd, monkeypatch):
    """An empty folder, in a process in which no Trainer has been built."""
    from tensorboard.summary.writer import event_file_writer

    monkeypatch.setattr(Session, "current", None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    # TensorBoard reads the files of one second in the order of this number as text.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(1000))
    with restore_process_state():
        yield cwd
    session._close_coordinator(None)
    set_spelling(None)
    set_quiet(False)
    atexit.unregister(session._close_at_exit)


@pytest.fixture
def root(cwd, monkeypatch):
    """The folder `runs`, which does not exist yet; tables that a command prints have 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    return cwd / "runs"


@pytest.fixture
def lines_of(root, capsys):
    """Returns a function that calls the `main` of a command, checks the exit code, and returns the printed lines."""

    def call(main, *arguments, code=0):
        assert main(arguments) == code
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        return (printed.out if code == 0 else printed.err).splitlines()

    return call


@pytest.fixture(scope="session")
def fork_server():
    """Starts a server that has imported torch and forks in milliseconds; forking pytest's own process is unsafe."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "torchmetrics", "rankzero.training.fit_loop"])
    with ProcessPoolExecutor(1, context) as pool:  # starts the server before a test counts child processes
        pool.submit(os.getpid).result()
    return context


@pytest.fixture
def on_ranks(fork_server):
    """Returns a function that calls a test module's function on all ranks and returns each rank's result."""

    def call(work, world_size, *arguments):
        with reserved_port() as port, ProcessPoolExecutor(world_size, fork_server) as pool:
            world = Launch(
                launcher="env",
                world_size=world_size,
                local_world_size=world_size,
                port=port,
                world_id="test",
                externally_created=True,
            )
            launches = [world._replace(rank=rank, local_rank=rank) for rank in range(world_size)]
            futures = [pool.submit(as_rank, work, launch, *arguments) for launch in launches]
            errors = [error for future in futures if (error := future.exception())]
            for error in sorted(errors, key=is_peer_failure):  # the cause, not a lost connection of another rank
                raise error
            return [future.result() for future in futures]

    return call
