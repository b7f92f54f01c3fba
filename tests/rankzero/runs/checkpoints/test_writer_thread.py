import subprocess
import sys
import threading

import pytest

from rankzero.runs.checkpoints.writer_thread import BackgroundWriter
from running import REPOSITORY


@pytest.fixture
def writer():
    writer = BackgroundWriter()
    yield writer
    writer.wait()


def test_work_runs_in_another_thread_while_the_caller_continues(writer):
    writer.wait()  # without work
    may_continue, results = threading.Event(), []
    writer.start(lambda: results.append((may_continue.wait(), threading.current_thread())))
    may_continue.set()
    writer.wait()
    writer.wait()
    ((waited, thread),) = results
    assert waited and thread is not threading.current_thread() and not thread.is_alive()


def test_the_next_work_begins_after_the_previous_work_has_ended(writer):
    steps, first_may_end = [], threading.Event()
    writer.start(lambda: first_may_end.wait() and steps.append("first"))
    caller = threading.Thread(target=writer.start, args=(lambda: steps.append("second"),))
    caller.start()
    assert steps == [] and caller.is_alive()
    first_may_end.set()
    caller.join()
    writer.wait()
    assert steps == ["first", "second"]


def test_work_that_waits_for_the_writer_does_not_wait_for_itself(writer):
    completed = []
    writer.start(lambda: completed.append(writer.wait()))
    writer.wait()
    assert completed == [None]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_work_can_follow_work_that_failed(writer):
    completed = []
    writer.start(lambda: 1 / 0)
    writer.start(lambda: completed.append("second"))
    writer.wait()
    assert completed == ["second"]


LATE = """
import pathlib, sys, threading
from rankzero.runs.checkpoints.writer_thread import BackgroundWriter

BackgroundWriter().start(lambda: (threading.main_thread().join(), pathlib.Path("written").touch()))
sys.exit(3)
"""


def test_a_process_exits_only_after_its_work(cwd):
    environment = {"PYTHONPATH": f"{REPOSITORY}/project"}
    assert subprocess.run([sys.executable, "-c", LATE], cwd=cwd, env=environment, timeout=60).returncode == 3
    assert (cwd / "written").exists()
