import os
import subprocess
import sys

import pytest

from rankzero.distributed.environments.launchers import local
from rankzero.distributed.process.exit_handshake import REPORT_FD, ExitHandshake, report_exit
from rankzero.distributed.process.spawn import run_processes

REPORTING = "from rankzero.distributed.process.exit_handshake import report_exit; report_exit()\n"
"""Code that a process runs before an intended exit."""


@pytest.fixture
def report():
    report = ExitHandshake()
    yield report
    report.close()


@pytest.fixture
def started_by(monkeypatch):
    """Returns a function that sets variables as if the parent process with the given id had started this process."""

    def start(parent, variables):
        for name, value in {local.SUPERVISOR_PID: str(parent), **variables}.items():
            monkeypatch.setenv(name, value)

    return start


def run(code, report):
    variables = {**os.environ, **report.variables, local.SUPERVISOR_PID: str(os.getpid())}
    return subprocess.run([sys.executable, "-c", code], env=variables, pass_fds=[report.write_end]).returncode


@pytest.mark.parametrize("code", [0, 3])
def test_a_reported_exit_is_detected_with_any_exit_code(report, code):
    assert run(f"{REPORTING}raise SystemExit({code})", report) == code
    assert report.was_received()


@pytest.mark.parametrize("end", ["pass", "import os; os._exit(0)", "import os; os.kill(os.getpid(), 9)"])
def test_an_exit_without_a_report_is_detected(report, end):
    run(end, report)
    assert not report.was_received()


def test_reports_of_two_processes_are_separate(report):
    second_report = ExitHandshake()
    run(REPORTING, second_report)
    assert (report.was_received(), second_report.was_received()) == (False, True)
    assert report.variables.keys() == {REPORT_FD} and report.variables != second_report.variables
    second_report.close()


def test_a_report_can_be_read_only_once(report, started_by):
    started_by(os.getppid(), report.variables)
    report_exit()
    assert [report.was_received(), report.was_received()] == [True, False]


def test_only_a_child_of_the_supervising_process_reports(report, started_by):
    for parent in (os.getpid(), 0, ""):
        started_by(parent, report.variables)
        report_exit()
        assert not report.was_received()


def test_a_process_without_both_handshake_variables_reports_nothing(report, started_by, monkeypatch):
    started_by(os.getppid(), {REPORT_FD: ""})
    report_exit()
    monkeypatch.delenv(REPORT_FD)
    report_exit()
    started_by(os.getppid(), report.variables)
    monkeypatch.delenv(local.SUPERVISOR_PID)
    report_exit()
    assert not report.was_received()


def test_a_report_to_a_closed_pipe_raises_nothing(started_by):
    report = ExitHandshake()
    started_by(os.getppid(), report.variables)
    report.close()
    report_exit()
    assert not report.was_received()


def test_close_closes_both_ends_of_the_pipe():
    report = ExitHandshake()
    ends = [report.write_end, report._read_end]
    report.close()
    for descriptor in ends:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_a_child_of_a_local_process_reports_nothing(capfd):
    """The child may have opened another file under the same descriptor."""
    child = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {REPORTING!r}], close_fds=False, check=True)"
    )
    assert run_processes([sys.executable, "-c", child], 1) == 1
    assert "exited with code 0 without an exit report" in capfd.readouterr().err
