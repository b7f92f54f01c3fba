"""Fixtures for tests in several folders."""

import importlib
import multiprocessing
import os
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache

import pytest

from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.process.stop_signals import SIGNALS
from rankzero.distributed.timers import TIMERS, Timers
from rankzero.messages import is_peer_failure
from running import TOY, as_rank, fit_in_folder, reserved_port, script_process, write_program


@pytest.fixture
def scale_timers():
    """Returns a function that multiplies all durations of `TIMERS` by a factor until the test ends."""

    def scale(factor):
        for name, value in vars(Timers).items():
            if isinstance(value, float):
                setattr(TIMERS, name, value * factor)

    yield scale
    scale(1)


@pytest.fixture
def script_folder(tmp_path):
    """An empty folder, in a process in which no Trainer has been built."""
    with script_process(tmp_path):
        yield tmp_path


@pytest.fixture
def restore_signals():
    """Restores the signal handlers that the `main` of a command installs."""
    yield
    SIGNALS.close()


@pytest.fixture
def add_module(cwd, monkeypatch):
    """Returns a function that writes a module of a user, which can be imported until the test ends."""
    names = []
    monkeypatch.syspath_prepend(cwd)

    def add(name, text):
        names.append(name)
        (cwd / f"{name}.py").write_text(text)
        importlib.invalidate_caches()

    yield add
    for name in names:
        sys.modules.pop(name, None)


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


@pytest.fixture
def without_permission(tmp_path):
    """Returns a context manager in which a folder cannot be read."""

    @contextmanager
    def closed(folder):
        folder.chmod(0)
        tmp_path.chmod(0o755)
        user = os.geteuid()
        if user == 0:  # root may read every folder
            os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(user)
            folder.chmod(0o755)

    return closed


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Returns a function that trains the run `x`, once for the same flags, and returns the folder of its runs."""

    @cache
    def train(*flags):
        return fit_in_folder(tmp_path_factory.mktemp("trained"), *flags, "--run", "x")

    return train


@pytest.fixture
def finished(trained, cwd):
    """Returns a function that copies a finished run `x` with the flags `TOY` to `runs`, and returns its directory."""

    def copy(epochs=1):
        shutil.copytree(trained(*TOY, "--epochs", str(epochs)), cwd / "runs")
        return cwd / "runs/x"

    return copy


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


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Replaces PATH by an empty folder, and returns a function that adds shell scripts to it.

    The function takes name=script arguments. Each script appends its arguments to the file `programs/NAME.calls`.
    """
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("PBS_CONF_FILE", str(folder / "pbs.conf"))  # this machine may have a PBS

    def add(**scripts):
        for name, script in scripts.items():
            file = folder / name
            write_program(file, f'PATH=/usr/bin:/bin\necho "$*" >>{file}.calls\n{script}')

    return add


@pytest.fixture
def calls(tmp_path):
    """Returns a function that returns the command lines with which a stand-in program was called."""

    def read(name):
        file = tmp_path / "programs" / f"{name}.calls"
        return file.read_text().splitlines() if file.exists() else []

    return read
