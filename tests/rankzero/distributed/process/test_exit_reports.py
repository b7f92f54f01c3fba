"""`os._exit` ends the calling process, so the tests call it in forked processes."""

import multiprocessing
import os
import sys
import threading

import pytest

from rankzero.distributed.process.exit_reports import ORIGINAL_EXIT, EarlyExit

WITHOUT_AN_EXIT = 99


@pytest.fixture
def forked(tmp_path):
    """Returns a function that runs code in a forked process and returns its exit code and its reports."""
    reports = tmp_path / "reports"

    def run(work, report=lambda status: reports.write_text(f"{reports.read_text()}{status},")):
        reports.write_text("")
        process = os.fork()
        if process == 0:
            try:
                EarlyExit(report).install()
                work()
            finally:
                ORIGINAL_EXIT(WITHOUT_AN_EXIT)
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), reports.read_text()

    return run


@pytest.mark.parametrize("status", [0, 1, 3, 75, 255])
def test_any_exit_code_is_reported_from_any_thread_and_replaced_by_1(forked, status):
    def exit_in_thread():
        thread = threading.Thread(target=lambda: os._exit(status=status))
        thread.start()
        thread.join()

    for work in (exit_in_thread, lambda: os._exit(status), lambda: os._exit(status=status)):
        assert forked(work) == (1, f"{status},")


def test_exits_other_than_os_exit_are_not_reported_and_the_process_exits_even_if_the_report_raises(forked):
    assert forked(lambda: None) == (WITHOUT_AN_EXIT, "")
    assert forked(lambda: sys.exit(3)) == (WITHOUT_AN_EXIT, "")

    def exit_without_stderr():
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os._exit(3)

    assert forked(exit_without_stderr, report=lambda status: {}[status]) == (1, "")


def test_forked_processes_keep_their_exit_code(forked):
    """torch's loader processes rely on this: multiprocessing ends them with `os._exit`."""

    def work():
        process = multiprocessing.get_context("fork").Process(target=sys.exit, args=(7,))
        process.start()
        process.join()
        os._exit(process.exitcode)

    assert forked(work) == (1, "7,")


def test_close_restores_os_exit_unless_it_was_replaced_again(monkeypatch):
    early_exit = EarlyExit(lambda status: None)
    early_exit.close()
    assert os._exit is ORIGINAL_EXIT
    early_exit.install()
    try:
        assert os._exit is not ORIGINAL_EXIT
    finally:
        early_exit.close()
    assert os._exit is ORIGINAL_EXIT and ORIGINAL_EXIT.__module__ == "posix"
    early_exit.install()
    monkeypatch.setattr(os, "_exit", print)
    early_exit.close()
    found = os._exit
    monkeypatch.undo()
    early_exit.close()
    assert found is print and os._exit is ORIGINAL_EXIT
