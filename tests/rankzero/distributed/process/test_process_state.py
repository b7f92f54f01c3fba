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

AS_ANOTHER_USER = """
import os
from pathlib import Path
from rankzero.distributed.process import process_state as module
module.Path = lambda path: Path("/nonexistent" + path)
os.getuid() or os.setuid(65534)
print(module.process_state(1))
"""


@pytest.fixture
def child():
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def test_the_start_time_equals_psutils_and_the_namespace_is_the_pid_namespace(child):
    for pid in (os.getpid(), child.pid):
        start_time = int(process_state(pid)[1]) / os.sysconf("SC_CLK_TCK") + psutil.boot_time()
        assert start_time == pytest.approx(psutil.Process(pid).create_time(), abs=2)
    assert process_namespace() == os.readlink("/proc/self/ns/pid")  # noqa: PTH115


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


@pytest.mark.parametrize("name", [b"", b"a b", b"a) S 1 2 (b", b"a\nb", "ä".encode(), "ä".encode() * 8])
def test_a_process_name_is_not_mistaken_for_fields(name):
    libc, comm = ctypes.CDLL(None), Path("/proc/self/comm").read_bytes().strip()
    _, start_time = process_state(os.getpid())
    libc.prctl(15, name, 0, 0, 0)  # PR_SET_NAME
    try:
        assert Path("/proc/self/comm").read_bytes() == name[:15] + b"\n"  # the kernel may cut a character of UTF-8
        assert process_state(os.getpid()) == ("R", start_time)
    finally:
        libc.prctl(15, comm, 0, 0, 0)


def test_without_proc_only_existence_is_known(monkeypatch, tmp_path, child):
    monkeypatch.setattr(module, "Path", lambda path: tmp_path / path.lstrip("/"))
    assert process_state(os.getpid()) == process_state(child.pid) == ("", "") and process_namespace() == ""
    child.kill()
    child.wait()
    assert process_state(child.pid) is None


def test_without_proc_a_process_of_another_user_exists():
    result = subprocess.run([sys.executable, "-c", AS_ANOTHER_USER], capture_output=True, text=True, check=True)
    assert result.stdout == "('', '')\n"
