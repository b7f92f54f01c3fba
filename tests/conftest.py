"""Fixtures and hooks of all tests; a test fails if variables, threads, processes or a process group remain after it."""

import gc
import os
import signal
import tempfile
import threading
from collections.abc import Collection, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import HealthCheck, settings

import running
from progress import Progress
from rankzero import messages
from rankzero.distributed.process.stop_signals import STOP_SIGNALS
from system.preloaded import programs

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")  # a busy machine sometimes needs more than hypothesis's 200 ms

DAEMONS = {"munged", "slurmctld", "slurmscriptd", "slurmd", "slurmstepd"}
"""Programs that serve many tests and stop after the last one."""


def pytest_configure(config):
    """Redirects keys and settings that tests create from the user's folder to a temporary one."""
    folder = tempfile.TemporaryDirectory(prefix="rankzero-tests-")
    config.add_cleanup(folder.cleanup)
    os.environ["XDG_CONFIG_HOME"] = folder.name
    os.environ["RES_OPTIONS"] = "timeout:1"  # torch looks up names of addresses, and a lost packet costs 5 s
    signal.signal(signal.SIGINT, signal.default_int_handler)  # programs in the background of a script ignore it
    if hasattr(config, "workerinput"):
        running.BIN = Path(config.workerinput["bin"])
        return
    config.pluginmanager.register(Progress(config))
    if "not system" not in config.option.markexpr:
        preloaded = programs(Path(folder.name) / "programs")
        running.BIN = preloaded.__enter__()
        config.add_cleanup(lambda: preloaded.__exit__(None, None, None))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Lets the workers of pytest-xdist use the programs of the process that starts them."""
    node.workerinput["bin"] = str(running.BIN)


SYSTEM = ("tests/system/", "tests/launch/", "tests/benchmarks/", "tests/test_readme.py", "tests/test_lowest.py")
"""Paths with system tests only. Elsewhere, tests marked `system` or with the fixture `on_ranks` are system tests."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks system tests, and runs the longest groups first, so that all workers finish at about the same time."""
    for item in items:
        if item.nodeid.startswith(SYSTEM) or "on_ranks" in getattr(item, "fixturenames", ()):
            item.add_marker("system")
    items.sort(key=_order)


def _order(item: pytest.Item) -> int:
    """Returns 0 for tests that one worker runs, 1 for other slow ones, and 2 for all others."""
    group = item.get_closest_marker("xdist_group")
    if group and group.args[0] in ("slurm", "pbs", "failures"):
        return 0
    return 1 if item.nodeid.startswith(("tests/test_readme", "tests/system")) else 2


@pytest.fixture(autouse=True)
def fail_on_leaks() -> Iterator[None]:
    initial_variables = _variables()
    initial_handlers = _signal_handlers()
    initial_threads = set(threading.enumerate())
    initial_children = {child.pid for child in _children()}
    yield
    assert _variables() == initial_variables, "the test leaked an environment variable"
    assert _signal_handlers() == initial_handlers, "the test leaked a signal handler"
    assert not (torch.distributed.is_available() and torch.distributed.is_initialized()), "a process group is left"
    leaves_trainer = bool(messages._spellings)
    messages.set_spelling(None)  # so that only this test fails
    assert not leaves_trainer, "a Trainer was built without `script_process`"
    started = set(threading.enumerate()) - initial_threads
    kept = [t for t in started if not t.daemon and not t.name.startswith("parts")]  # "parts": a pool for all tests
    for thread in kept:
        thread.join(timeout=5)  # its work may be done, but its last lines not yet
    leaked = [thread.name for thread in kept if thread.is_alive()]
    assert not leaked, f"the test leaked threads: {leaked}"
    leaked_processes = _children(initial_children)
    if leaked_processes:
        gc.collect()  # a loader keeps its processes as long as something, such as a traceback, refers to it
        psutil.wait_procs(leaked_processes, timeout=5)
        leaked_processes = _children(initial_children)
    assert not leaked_processes, f"the test leaked processes: {leaked_processes}"


def _variables() -> dict[str, str]:
    """Returns the environment without the variables that pytest, scikit-learn and torch's compiler set (on import)."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "KMP_", "TORCHINDUCTOR_"))
    }


def _signal_handlers() -> dict[signal.Signals, object]:
    return {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}


def _children(known: Collection[int] = ()) -> list[psutil.Process]:
    """Returns the processes that this process or its children have started, without those with a known process id."""
    children = [child for child in psutil.Process().children(recursive=True) if child.pid not in known]
    running = [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in running if child.name() not in DAEMONS]


@pytest.fixture
def cwd(tmp_path, monkeypatch):
    """Makes an empty folder the working directory, and returns it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def finders_without_gc(monkeypatch):
    """Disables garbage collection in Lightning's batch size finder: several per trial, seconds with many objects."""
    monkeypatch.setattr("lightning.pytorch.tuner.batch_size_scaling.garbage_collection_cuda", lambda: None)
