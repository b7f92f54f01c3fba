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


def test_pythonfaulthandler_set_by_the_user_keeps_tracebacks_on_stderr(run, cwd):
    assert "Fatal Python error: Aborted" in crash(cwd, "SIGABRT", PYTHONFAULTHANDLER="1")
    assert "Fatal" not in run.log(0).read_text() and CrashLog(run).describe_crash(0) == ""


@pytest.mark.parametrize(("variables", "printed"), [({}, False), ({"PYTHONFAULTHANDLER": "1"}, True)])
def test_disable_restores_the_previous_destination_of_tracebacks(run, cwd, variables, printed):
    assert ("Fatal" in crash(cwd, "SIGSEGV", "disabled", **variables)) == printed
    assert CrashLog(run).describe_crash(0) == ""


STARTED = "2026-01-01 INFO attempt {}: started\n"
FATAL = "Fatal Python error: {}\n\nCurrent thread\n"
LOGS = {
    "nothing": (b"", ""),
    "no crash": (STARTED.format(2).encode(), ""),
    "an unknown error": ((STARTED.format(2) + FATAL.format("no memory")).encode(), "no memory"),
    "a crash of the attempt before": ((STARTED.format(1) + FATAL.format("Aborted") + STARTED.format(2)).encode(), ""),
    "a crash of the attempt after": ((STARTED.format(1) + STARTED.format(22) + FATAL.format("Aborted")).encode(), ""),
    "a crash before any attempt": (FATAL.format("Aborted").encode(), ""),
    "a second start of the attempt": (
        (STARTED.format(2) + FATAL.format("Bus error") + STARTED.format(2) + FATAL.format("Aborted")).encode(),
        "SIGABRT",
    ),
    "words within a line": ((STARTED.format(2) + "ERROR " + FATAL.format("Aborted")).encode(), ""),
    "not UTF-8": (b"\xff\xfe\n" + (STARTED.format(2) + FATAL.format("Aborted")).encode() + b"\xff", "SIGABRT"),
    "a long log before the crash": (
        (STARTED.format(2) + "2026-01-01 INFO loss 1\n" * 20_000 + FATAL.format("Aborted")).encode(),
        "SIGABRT",
    ),
    "a long log after the crash": (
        (STARTED.format(2) + FATAL.format("Aborted") + "  File x, line 1\n" * 20_000).encode(),
        "SIGABRT",
    ),
    "a long log before the attempt": (
        b"\xc3\xa4" * 200_000 + (STARTED.format(2) + FATAL.format("Bus error")).encode(),
        "SIGBUS",
    ),
}


@pytest.mark.parametrize("name", LOGS)
def test_only_a_crash_of_this_attempt_is_reported(run, name):
    content, ended_by = LOGS[name]
    run.log(0).write_bytes(content)
    assert CrashLog(run).describe_crash(0) == (f"was killed by {ended_by}, see {run.log(0)}" if ended_by else "")


def test_an_unreadable_log_reports_no_crash(run):
    run.log(0).mkdir()
    assert CrashLog(run).describe_crash(0) == "" and CrashLog(run).describe_crash(7) == ""
