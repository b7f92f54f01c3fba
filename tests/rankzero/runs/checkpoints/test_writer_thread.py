import subprocess
import sys
import threading

import pytest

from rankzero.runs.checkpoints.writer_thread import BackgroundWriter
from running import REPOSITORY


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_work_runs_in_another_thread_after_the_previous_work_and_never_waits_for_itself():
    writer = BackgroundWriter()
    writer.wait()  # without work
    results, first_may_end = [], threading.Event()
    writer.start(lambda: results.append((first_may_end.wait(), threading.current_thread())))
    caller = threading.Thread(target=writer.start, args=(lambda: results.append(writer.wait()),))
    caller.start()
    assert results == [] and caller.is_alive()
    first_may_end.set()
    caller.join()
    writer.wait()
    writer.wait()
    (waited, thread), second = results
    assert waited and thread is not threading.current_thread() and not thread.is_alive() and second is None
    writer.start(lambda: 1 / 0)
    writer.start(lambda: results.append("after work that failed"))
    writer.wait()
    assert results[2:] == ["after work that failed"]


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
