import os
import subprocess
import sys

import pytest

from rankzero.distributed.environments.launchers import local
from rankzero.distributed.process.exit_handshake import REPORT, ExitHandshake, report_exit
from rankzero.distributed.process.spawn import run_processes

REPORTING = "from rankzero.distributed.process.exit_handshake import report_exit; report_exit()\n"
"""What a process does before it ends on purpose."""


@pytest.fixture
def report():
    report = ExitHandshake()
    yield report
    report.close()


@pytest.fixture
def started_by(monkeypatch):
    """Makes the test a process that was started by a process of this id, with these variables."""

    def start(parent, variables):
        for name, value in {local.MARK: str(parent), **variables}.items():
            monkeypatch.setenv(name, value)

    return start


def run(code, report):
    variables = {**os.environ, **report.variables, local.MARK: str(os.getpid())}
    return subprocess.run([sys.executable, "-c", code], env=variables, pass_fds=[report.writing]).returncode


@pytest.mark.parametrize("code", [0, 3])
def test_a_process_that_reports_before_it_ends(report, code):
    assert run(f"{REPORTING}raise SystemExit({code})", report) == code
    assert report.is_there()


@pytest.mark.parametrize("end", ["pass", "import os; os._exit(0)", "import os; os.kill(os.getpid(), 9)"])
def test_a_process_that_ends_without_a_report(report, end):
    run(end, report)
    assert not report.is_there()


def test_reports_of_two_processes_are_kept_apart(report):
    other = ExitHandshake()
    run(REPORTING, other)
    assert (report.is_there(), other.is_there()) == (False, True)
    assert report.variables.keys() == {REPORT} and report.variables != other.variables
    other.close()


def test_a_report_is_read_once(report, started_by):
    started_by(os.getppid(), report.variables)
    report_exit()
    assert [report.is_there(), report.is_there()] == [True, False]


def test_only_a_child_of_the_watching_process_reports(report, started_by):
    for parent in (os.getpid(), 0, ""):
        started_by(parent, report.variables)
        report_exit()
        assert not report.is_there()


def test_a_process_that_nobody_watches_reports_nothing(report, started_by, monkeypatch):
    started_by(os.getppid(), {REPORT: ""})
    report_exit()
    monkeypatch.delenv(REPORT)
    report_exit()
    started_by(os.getppid(), report.variables)
    monkeypatch.delenv(local.MARK)
    report_exit()
    assert not report.is_there()


def test_a_descriptor_that_is_closed_raises_nothing(started_by):
    report = ExitHandshake()
    started_by(os.getppid(), report.variables)
    report.close()
    report_exit()
    assert not report.is_there()


def test_closing_closes_both_ends():
    report = ExitHandshake()
    ends = [report.writing, report._reading]
    report.close()
    for descriptor in ends:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_a_process_of_a_process_reports_nothing(capfd):
    """It may have another file open under the same number."""
    child = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {REPORTING!r}], close_fds=False, check=True)"
    )
    assert run_processes([sys.executable, "-c", child], 1) == 1
    assert "ended with exit code 0 without a report" in capfd.readouterr().err
