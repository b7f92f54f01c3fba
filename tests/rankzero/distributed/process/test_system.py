import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rankzero.distributed.process import system
from rankzero.distributed.process.system import cpu_quota, process_state

V1 = "31 23 0:28 / {mount} rw - cgroup cgroup rw,cpu,cpuacct"
MEMORY = V1.replace("cpu,cpuacct", "memory")
V2 = "41 31 0:38 / {mount} rw,relatime shared:5 master:1 - cgroup2 cgroup2 rw,nsdelegate"
STATISTICS = "anon 900\ninactive_file 200\ntotal_inactive_file 300\n"


@pytest.fixture
def write_process_files(tmp_path):
    """Returns a function that writes a process's cgroup files, and the /proc files that locate them."""

    def write(mount, membership, files):
        for path, text in files.items():
            (tmp_path / "mount" / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "mount" / path).write_text(text)
        (tmp_path / "cgroup").write_text(f"9:name=systemd:/\n{membership}\n")
        (tmp_path / "mountinfo").write_text(mount.format(mount=tmp_path / "mount") + "\n")
        return tmp_path

    return write


def test_linux_cpu_lists_are_parsed_and_formatted():
    for text, cpus in {"0": {0}, "0-2,8": {0, 1, 2, 8}, "1,3": {1, 3}, "": set()}.items():
        assert system.parse_cpus(text) == system.parse_cpus(f"{text}\n") == cpus and system.format_cpus(cpus) == text
    assert system.format_cpus([9, 0, 1, 2, 11]) == "0-2,9,11"


def test_usable_cores_respect_the_cpu_affinity_and_count_hardware_threads_of_one_core_once(tmp_path, monkeypatch):
    code = "from rankzero.distributed.process.system import usable_cores; print(sorted(usable_cores()))"
    cpu = max(os.sched_getaffinity(0))
    result = subprocess.run(["taskset", "-c", str(cpu), sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == str([system._core_of(cpu)]), result.stderr
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        (tmp_path / f"cpu{cpu}/topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}/topology/thread_siblings_list").write_text(f"{siblings}\n")
    system._core_of.cache_clear()
    monkeypatch.setattr(system, "TOPOLOGY", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    assert system.usable_cores() == {0, 1}
    system._core_of.cache_clear()


@pytest.mark.parametrize(
    ("mount", "membership", "files", "cpus"),
    [
        (V2, "0::/job/step", {"job/step/cpu.max": "150000 100000\n"}, 1.5),
        (V2, "0::/job/step", {"job/cpu.max": "400000 100000\n", "job/step/cpu.max": "max 100000\n"}, 4),
        (V2, "0::/job/step", {"job/cpu.max": "400000 100000\n", "job/step/cpu.max": "600000 100000\n"}, 4),
        (V2, "0::/", {"cpu.max": "max 100000\n"}, None),
        (V2, "0::/", {"cpu.max": "what is this\n"}, None),
        (V2.replace(" / ", " /docker/x "), "0::/docker/x", {"cpu.max": "50000 100000\n"}, 0.5),
        (V2, "0::/../other", {"cpu.max": "300000 100000\n"}, 3),
        (V1, "4:cpu,cpuacct:/job", {"job/cpu.cfs_quota_us": "250000\n", "job/cpu.cfs_period_us": "100000\n"}, 2.5),
        (V1, "4:cpu,cpuacct:/job", {"job/cpu.cfs_quota_us": "-1\n", "job/cpu.cfs_period_us": "100000\n"}, None),
        (V1, "4:cpuset:/job", {"job/cpu.cfs_quota_us": "250000\n", "job/cpu.cfs_period_us": "100000\n"}, None),
        (V1, "4:cpu,cpuacct:/x", {"cpu.cfs_quota_us": "200000\n", "cpu.cfs_period_us": "100000\n"}, 2),
    ],
)
def test_the_lowest_quota_of_all_enclosing_cgroups_applies(write_process_files, mount, membership, files, cpus):
    quota = cpu_quota(write_process_files(mount, membership, files))
    assert (quota.cpus if quota else None) == cpus


def test_processes_under_the_same_quota_report_the_same_cgroup(tmp_path, write_process_files):
    assert cpu_quota(tmp_path) is None  # a system without cgroups
    files = {"job/cpu.max": "400000 100000\n", "job/a/cpu.max": "max 100000\n", "b/cpu.max": "400000 100000\n"}
    shared = [cpu_quota(write_process_files(V2, f"0::{path}", files)).cgroup for path in ("/job", "/job/a")]
    assert shared[0] == shared[1] != cpu_quota(write_process_files(V2, "0::/b", files)).cgroup


@pytest.mark.parametrize(
    ("mount", "membership", "files", "available"),
    [
        (V2, "0::/job/step", {"job/memory.max": "5000\n", "job/memory.current": "1000\n"}, 4200),
        (V2, "0::/job/step", {"job/memory.max": "5000\n", "job/memory.current": "5500\n"}, 0),
        (V2, "0::/job/step", {"job/memory.max": "max\n", "job/memory.current": "1000\n"}, None),
        (V2, "0::/job/step", {}, None),
        (MEMORY, "4:memory:/job", {"job/memory.limit_in_bytes": "5000\n", "job/memory.usage_in_bytes": "1000\n"}, 4300),
        (MEMORY, "4:pids:/job", {"job/memory.limit_in_bytes": "5000\n", "job/memory.usage_in_bytes": "1\n"}, None),
    ],
)
def test_the_memory_limit_of_an_enclosing_cgroup_applies(write_process_files, mount, membership, files, available):
    folder = write_process_files(mount, membership, {**files, "job/memory.stat": STATISTICS})
    if available is None:
        assert system.available_memory(folder) > psutil.virtual_memory().total // 100
    else:
        assert system.available_memory(folder) == available


AS_ANOTHER_USER = """
import os
from pathlib import Path
from rankzero.distributed.process import system
system.Path = lambda path: Path("/nonexistent" + path)
os.getuid() or os.setuid(65534)
print(system.process_state(1))
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
    assert system.process_namespace() == os.readlink("/proc/self/ns/pid")  # noqa: PTH115


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
    monkeypatch.setattr(system, "Path", lambda path: tmp_path / path.lstrip("/"))
    assert process_state(os.getpid()) == process_state(child.pid) == ("", "") and system.process_namespace() == ""
    child.kill()
    child.wait()
    assert process_state(child.pid) is None


def test_without_proc_a_process_of_another_user_exists():
    result = subprocess.run([sys.executable, "-c", AS_ANOTHER_USER], capture_output=True, text=True, check=True)
    assert result.stdout == "('', '')\n"


def test_the_commands_of_ancestors_are_read_with_all_arguments_and_need_not_be_utf8():
    code = "from rankzero.distributed.process.system import ancestor_commands; print(ascii(next(ancestor_commands())))"
    command = [b"sh", b"-c", f"'{sys.executable}' -c '{code}'; true".encode(), b"--nnodes", b"two words", b"caf\xe9"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "'--nnodes', 'two words', 'caf\\udce9'" in printed
