"""Which work at the end of a program is done. Each program runs in a process of its own, with a stand-in for torch."""

import os
import subprocess
import sys

import pytest

from running import SOURCES

PROGRAM = """
import atexit, sys
{before}
import rankzero
from rankzero.distributed.process.at_exit import exit_quickly_with
import threading, time

class Noisy:
    def __init__(self, name):
        self.name, self.cycle = name, self
    def __del__(self):
        print(self.name, "deleted")

sys.modules["torch"] = sys
Noisy("garbage")
kept = Noisy("module's")
file = open("file", "w")
file.write("text")
atexit.register(print, "exit function")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
{end}
"""


@pytest.mark.parametrize(
    ("options", "before", "end", "has_teardown"),
    [
        ({}, "", "sys.exit(exit_quickly_with(3))", False),
        ({}, "", "sys.exit(3)", True),
        ({}, "atexit.register(print, 'first')", "sys.exit(exit_quickly_with(3))", True),
        ({"CUDA_INJECTION64_PATH": "/profiler.so"}, "", "sys.exit(exit_quickly_with(3))", True),
        ({}, "", "sys.modules['mpi4py.MPI'] = sys; sys.exit(exit_quickly_with(3))", True),
        ({"PYTHONINSPECT": "1"}, "", "exit_quickly_with(3)", True),
    ],
    ids=["a command", "a script", "an earlier exit function", "a profiler", "MPI", "an interpreter left open"],
)
def test_only_a_teardown_that_is_not_needed_is_skipped(tmp_path, options, before, end, has_teardown):
    (tmp_path / "program.py").write_text(PROGRAM.format(before=before, end=end))
    command, environment = [sys.executable, "program.py"], {**os.environ, "PYTHONPATH": SOURCES, **options}
    streams = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    result = subprocess.run(command, cwd=tmp_path, env=environment, timeout=60, **streams)
    assert result.returncode == (0 if "PYTHONINSPECT" in options else 3)
    assert {"thread", "exit function", "garbage deleted"} <= set(result.stdout.splitlines()), result.stderr
    assert (tmp_path / "file").read_text() == "text"
    assert ("module's deleted" in result.stdout) == has_teardown
