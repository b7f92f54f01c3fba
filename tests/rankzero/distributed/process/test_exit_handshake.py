import os
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


def set_parent(monkeypatch, parent, variables):
    """Sets variables as if the parent process with the given id had started this process."""
    for name, value in {local.SUPERVISOR_PID: str(parent), **variables}.items():
        monkeypatch.setenv(name, value)


def test_only_a_child_of_the_supervising_process_with_both_variables_reports_once(report, monkeypatch):
    for parent in (os.getpid(), 0, ""):
        set_parent(monkeypatch, parent, report.variables)
        report_exit()
        assert not report.was_received()
    set_parent(monkeypatch, os.getppid(), {REPORT_FD: ""})
    report_exit()
    monkeypatch.delenv(REPORT_FD)
    report_exit()
    set_parent(monkeypatch, os.getppid(), report.variables)
    monkeypatch.delenv(local.SUPERVISOR_PID)
    report_exit()
    assert not report.was_received()
    set_parent(monkeypatch, os.getppid(), report.variables)
    report_exit()
    assert [report.was_received(), report.was_received()] == [True, False]


def test_close_closes_both_ends_of_the_pipe_and_a_later_report_raises_nothing(monkeypatch):
    report = ExitHandshake()
    set_parent(monkeypatch, os.getppid(), report.variables)
    ends = [report.write_end, report._read_end]
    report.close()
    report_exit()
    assert not report.was_received()
    for descriptor in ends:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_a_child_of_a_local_process_reports_nothing(capfd):
    """The child may have opened another file under the same descriptor."""
    run_again = f"subprocess.run([sys.executable, '-c', {REPORTING!r}], close_fds=False, check=True)"
    assert run_processes([sys.executable, "-c", f"import subprocess, sys; {run_again}"], 1) == 1
    assert "exited with code 0 without an exit report" in capfd.readouterr().err
