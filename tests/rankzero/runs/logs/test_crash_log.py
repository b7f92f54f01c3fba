import os
import subprocess
import sys

import pytest

from rankzero.runs.directory import RunDirectory
from rankzero.runs.logs.crash_log import CrashLog
from running import REPOSITORY

CRASH = """
import os, resource, signal, sys
from pathlib import Path
from rankzero.runs.logs.crash_log import CrashLog
from rankzero.runs.directory import RunDirectory

assert "torch" not in sys.modules
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
run = RunDirectory(Path("x"), attempt=2)
crash_log = CrashLog(run)
with run.log(0).open("a") as log:
    log.write("2026-01-01 INFO attempt 2: started\\n")
    log.flush()
    crash_log.enable(log)
    if sys.argv[2] == "disabled":
        crash_log.disable()
    os.kill(os.getpid(), signal.Signals[sys.argv[1]])
"""


@pytest.fixture
def run(cwd):
    (cwd / "x/logs").mkdir(parents=True)
    return RunDirectory(cwd / "x", attempt=2)


def crash(cwd, name, state="enabled", **variables):
    """Runs a process that kills itself with a signal; returns its stderr."""
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}/project", **variables}
    command = [sys.executable, "-c", CRASH, name, state]
    process = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)
    assert process.returncode < 0
    return process.stderr


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL"])
def test_a_crash_is_logged_with_its_traceback_and_named_by_its_signal(run, cwd, name):
    assert "Fatal" not in crash(cwd, name)
    assert 'File "<string>", line' in run.log(0).read_text()
    assert CrashLog(run).describe_crash(0) == f"was killed by {name}, see {run.log(0)}"
    assert CrashLog(run).describe_crash(1) == ""


SET_BY_USER = {"PYTHONFAULTHANDLER": "1"}


@pytest.mark.parametrize(
    ("state", "variables", "printed"),
    [("enabled", SET_BY_USER, True), ("disabled", {}, False), ("disabled", SET_BY_USER, True)],
)
def test_a_destination_of_tracebacks_set_by_the_user_is_kept_and_restored(run, cwd, state, variables, printed):
    assert ("Fatal Python error: Aborted" in crash(cwd, "SIGABRT", state, **variables)) == printed
    assert "Fatal" not in run.log(0).read_text() and CrashLog(run).describe_crash(0) == ""


STARTED = "2026-01-01 INFO attempt 2: started\n"
STARTED_BEFORE = STARTED.replace("2:", "1:")


def fatal(error="Aborted"):
    return f"Fatal Python error: {error}\n\nCurrent thread\n"


LOGS = {
    "a folder": (None, ""),
    "nothing": ("", ""),
    "no crash": (STARTED, ""),
    "an unknown error": (STARTED + fatal("no memory"), "no memory"),
    "a crash of the attempt before": (STARTED_BEFORE + fatal() + STARTED, ""),
    "a crash of the attempt after": (STARTED_BEFORE + STARTED.replace("2:", "22:") + fatal(), ""),
    "a crash before any attempt": (fatal(), ""),
    "a second start of the attempt": (STARTED + fatal("Bus error") + STARTED + fatal(), "SIGABRT"),
    "words within a line": (STARTED + "ERROR " + fatal(), ""),
    "not UTF-8": ("\xff\xfe\n" + STARTED + fatal() + "\xff", "SIGABRT"),
    "a long log before the crash": (STARTED + "2026-01-01 INFO loss 1\n" * 20_000 + fatal(), "SIGABRT"),
    "a long log after the crash": (STARTED + fatal() + "  File x, line 1\n" * 20_000, "SIGABRT"),
    "a long log before the attempt": ("\xc3\xa4" * 200_000 + STARTED + fatal("Bus error"), "SIGBUS"),
}


@pytest.mark.parametrize("name", LOGS)
def test_only_a_crash_of_this_attempt_is_reported(run, name):
    content, ended_by = LOGS[name]
    run.log(0).mkdir() if content is None else run.log(0).write_bytes(content.encode("latin-1"))
    assert CrashLog(run).describe_crash(7) == ""
    assert CrashLog(run).describe_crash(0) == (f"was killed by {ended_by}, see {run.log(0)}" if ended_by else "")
