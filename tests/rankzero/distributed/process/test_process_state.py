"""Tests on real processes; psutil provides the expected start times."""

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rankzero.distributed.process import process_state as module
from rankzero.distributed.process.process_state import process_namespace, process_state


@pytest.fixture
def child():
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def start_seconds(state):
    return int(state[1]) / os.sysconf("SC_CLK_TCK") + psutil.boot_time()


def test_the_start_time_equals_psutils(child):
    for pid in (os.getpid(), child.pid):
        assert start_seconds(process_state(pid)) == pytest.approx(psutil.Process(pid).create_time(), abs=2)


def test_stopped_zombie_and_missing_processes_are_distinguished(child):
    _, start_time = process_state(child.pid)
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    assert process_state(child.pid) == ("T", start_time)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_state(child.pid) == ("Z", start_time)
    child.wait()
    assert process_state(child.pid) is None


@pytest.mark.parametrize("name", [b"", b"a b", b"a) S 1 2 (b", b"a\nb", "ä".encode()])
def test_a_process_name_is_not_mistaken_for_fields(name):
    libc, comm = ctypes.CDLL(None), Path("/proc/self/comm").read_bytes().strip()
    _, start_time = process_state(os.getpid())
    libc.prctl(15, name, 0, 0, 0)  # PR_SET_NAME
    try:
        assert Path("/proc/self/comm").read_bytes() == name + b"\n"
        assert process_state(os.getpid()) == ("R", start_time)
    finally:
        libc.prctl(15, comm, 0, 0, 0)


def test_a_process_name_cut_within_a_utf8_character_is_accepted():
    libc, comm = ctypes.CDLL(None), Path("/proc/self/comm").read_bytes().strip()
    libc.prctl(15, "ä".encode() * 8, 0, 0, 0)  # the kernel keeps 15 bytes
    try:
        assert process_state(os.getpid())
    finally:
        libc.prctl(15, comm, 0, 0, 0)


@pytest.fixture
def without_proc(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "Path", lambda path: tmp_path / path.lstrip("/"))


def test_without_proc_only_existence_is_known(without_proc, child):
    assert process_state(os.getpid()) == process_state(child.pid) == ("", "")
    child.kill()
    child.wait()
    assert process_state(child.pid) is None


def test_the_namespace_is_the_pid_namespace():
    assert process_namespace() == os.readlink("/proc/self/ns/pid")  # noqa: PTH115


def test_without_proc_the_namespace_is_empty(without_proc):
    assert process_namespace() == ""


AS_ANOTHER_USER = """
import os
from pathlib import Path
from rankzero.distributed.process import process_state as module
module.Path = lambda path: Path("/nonexistent" + path)
os.getuid() or os.setuid(65534)
print(module.process_state(1))
"""


def test_without_proc_a_process_of_another_user_exists():
    result = subprocess.run([sys.executable, "-c", AS_ANOTHER_USER], capture_output=True, text=True, check=True)
    assert result.stdout == "('', '')\n"
