import faulthandler
import os
import shutil
import subprocess
import sys

import pytest

from rankzero.runs.directory import RunDirectory
from rankzero.runs.rank_log import RankLog
from running import REPOSITORY


@pytest.fixture
def run(tmp_path):
    run = RunDirectory(tmp_path / "x")
    run.begin_attempt("model: {}\n")
    return run


@pytest.fixture
def opened(run, monkeypatch):
    """Returns a function that opens the log of a rank, which is closed after the test."""
    opened, destinations = [], []
    monkeypatch.setattr(faulthandler, "is_enabled", lambda: False)
    monkeypatch.setattr(faulthandler, "enable", lambda log: destinations.append(log.name))
    monkeypatch.setattr(faulthandler, "disable", lambda: destinations.append(None))

    def open_log(rank=0):
        opened.append(RankLog(run, rank))
        opened[-1].open()
        return opened[-1].logger, destinations

    yield open_log
    for log in opened:
        log.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_deleted_log_is_created_again_with_one_warning_on_rank_zero(run, opened, rank, capsys):
    logger, destinations = opened(rank)
    for number in range(3):
        logger.info("before %d", number)
        shutil.rmtree(run.log(rank).parent)
        logger.info("after %d", number)
    lines = run.log(rank).read_text().splitlines()
    assert len(lines) == 2 and "attempt 1: this log was deleted" in lines[0] and "INFO after 2" in lines[1]
    err = capsys.readouterr().err
    assert err.count("\n") == (rank == 0) and (str(run.path / "logs") in err) == (rank == 0)
    assert destinations == [str(run.log(rank))] + [None, str(run.log(rank))] * 3


def test_a_run_that_was_removed_is_not_created_again_and_any_text_can_be_logged_in_any_locale(run, opened, monkeypatch):
    monkeypatch.setattr("locale.getpreferredencoding", lambda *arguments: "ascii")
    logger, _ = opened()
    shutil.rmtree(run.path)
    logger.info("after")
    assert not run.path.exists()
    run.path.mkdir()
    logger.info("größe 漢 \udcff")
    assert run.log(0).read_text(encoding="utf-8").endswith("INFO größe 漢 \\udcff\n")


def test_the_log_of_an_archived_run_stays_in_the_archive(run, opened, tmp_path):
    logger, _ = opened()
    run.archive()
    RunDirectory(run.path).begin_attempt("model: {}\n")
    logger.info("of the earlier run")
    (archived,) = tmp_path.glob("x.before-1/logs/rank-000.log")
    assert "of the earlier run" in archived.read_text() and not run.log(0).exists()


CRASH = """
import os, resource, signal, sys
from pathlib import Path
from rankzero.runs.directory import RunDirectory
from rankzero.runs.rank_log import RankLog

assert "torch" not in sys.modules
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
log = RankLog(RunDirectory(Path("x"), attempt=2), 0)
log.open()
log.logger.info("attempt 2: started")
if sys.argv[2] == "disabled":
    log.close()
os.kill(os.getpid(), signal.Signals[sys.argv[1]])
"""


@pytest.fixture
def crashed_run(cwd):
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
def test_a_crash_is_logged_with_its_traceback_and_named_by_its_signal(crashed_run, cwd, name):
    assert "Fatal" not in crash(cwd, name)
    assert 'File "<string>", line' in crashed_run.log(0).read_text()
    assert RankLog(crashed_run, 0).describe_crash(0) == f"was killed by {name}, see {crashed_run.log(0)}"
    assert RankLog(crashed_run, 0).describe_crash(1) == ""


SET_BY_USER = {"PYTHONFAULTHANDLER": "1"}


@pytest.mark.parametrize(
    ("state", "variables", "printed"),
    [("enabled", SET_BY_USER, True), ("disabled", {}, False), ("disabled", SET_BY_USER, True)],
)
def test_a_destination_of_tracebacks_set_by_the_user_is_kept_and_restored(crashed_run, cwd, state, variables, printed):
    assert ("Fatal Python error: Aborted" in crash(cwd, "SIGABRT", state, **variables)) == printed
    assert "Fatal" not in crashed_run.log(0).read_text() and RankLog(crashed_run, 0).describe_crash(0) == ""


STARTED = "2026-01-01 INFO attempt 2: started\n"
STARTED_BEFORE = STARTED.replace("2:", "1:")


def fatal(error="Aborted"):
    return f"Fatal Python error: {error}\n\nCurrent thread\n"


LOGS = {
    "a folder": (None, ""),
    "a crash of the attempt before": (STARTED_BEFORE + fatal() + STARTED, ""),
    "a second start of the attempt": (STARTED + fatal("Bus error") + STARTED + fatal(), "SIGABRT"),
    "words within a line": (STARTED + "ERROR " + fatal(), ""),
    "not UTF-8": ("\xff\xfe\n" + STARTED + fatal() + "\xff", "SIGABRT"),
    "a long log before the crash": (STARTED + "2026-01-01 INFO loss 1\n" * 20_000 + fatal(), "SIGABRT"),
}


@pytest.mark.parametrize("name", LOGS)
def test_only_a_crash_of_this_attempt_is_reported(crashed_run, name):
    content, ended_by = LOGS[name]
    crashed_run.log(0).mkdir() if content is None else crashed_run.log(0).write_bytes(content.encode("latin-1"))
    assert RankLog(crashed_run, 0).describe_crash(7) == ""
    assert RankLog(crashed_run, 0).describe_crash(0) == (
        f"was killed by {ended_by}, see {crashed_run.log(0)}" if ended_by else ""
    )
