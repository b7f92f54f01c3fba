"""`os._exit` ends the calling process, so the tests call it in forked processes."""

import multiprocessing
import os
import sys
import threading

import pytest

from rankzero.distributed.process.early_exit import ORIGINAL_EXIT, EarlyExit

WITHOUT_AN_EXIT = 99


@pytest.fixture
def forked():
    """Returns a function that runs code in a forked process and returns its exit code and its reports."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)

    def run(work):
        process = os.fork()
        if process == 0:
            try:
                EarlyExit(lambda status: os.write(writing, f"{status},".encode())).install()
                work()
            finally:
                ORIGINAL_EXIT(WITHOUT_AN_EXIT)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        try:
            return code, os.read(reading, 100).decode()
        except BlockingIOError:
            return code, ""

    yield run
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("status", [0, 1, 3, 75, 255])
def test_any_exit_code_is_reported_and_replaced_by_1(forked, status):
    assert forked(lambda: os._exit(status)) == (1, f"{status},")


def test_the_exit_code_may_be_a_keyword_argument(forked):
    assert forked(lambda: os._exit(status=3)) == (1, "3,")


def test_an_exit_from_a_thread_is_reported(forked):
    def work():
        thread = threading.Thread(target=lambda: os._exit(4))
        thread.start()
        thread.join()

    assert forked(work) == (1, "4,")


def test_exits_other_than_os_exit_are_not_reported(forked):
    assert forked(lambda: None) == (WITHOUT_AN_EXIT, "")
    assert forked(lambda: sys.exit(3)) == (WITHOUT_AN_EXIT, "")


def test_the_process_exits_even_if_the_report_raises():
    process = os.fork()
    if process == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            EarlyExit(lambda status: {}[status]).install()
            os._exit(3)
        finally:
            ORIGINAL_EXIT(WITHOUT_AN_EXIT)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 1


def test_forked_processes_keep_their_exit_code(forked):
    """torch's loader processes rely on this: multiprocessing ends them with `os._exit`."""

    def work():
        process = multiprocessing.get_context("fork").Process(target=sys.exit, args=(7,))
        process.start()
        process.join()
        os._exit(process.exitcode)

    assert forked(work) == (1, "7,")


def test_close_restores_os_exit():
    early_exit = EarlyExit(lambda status: None)
    early_exit.close()
    assert os._exit is ORIGINAL_EXIT
    early_exit.install()
    try:
        assert os._exit is not ORIGINAL_EXIT
    finally:
        early_exit.close()
    assert os._exit is ORIGINAL_EXIT and ORIGINAL_EXIT.__module__ == "posix"


def test_close_keeps_a_later_replacement_of_os_exit(monkeypatch):
    early_exit = EarlyExit(lambda status: None)
    early_exit.install()
    replacement = print
    monkeypatch.setattr(os, "_exit", replacement)
    early_exit.close()
    found = os._exit
    monkeypatch.undo()
    early_exit.close()
    assert found is replacement and os._exit is ORIGINAL_EXIT
