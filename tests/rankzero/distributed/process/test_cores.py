import os
import subprocess
import sys

import psutil
import pytest

from rankzero.distributed.process import cores
from rankzero.distributed.process.cores import cpu_quota, format_cpus, parse_cpus, usable_cores
from rankzero.distributed.process.memory import available_memory

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
        assert parse_cpus(text) == parse_cpus(f"{text}\n") == cpus and format_cpus(cpus) == text
    assert format_cpus([9, 0, 1, 2, 11]) == "0-2,9,11"


def test_usable_cores_respect_the_cpu_affinity_and_count_hardware_threads_of_one_core_once(tmp_path, monkeypatch):
    code = "from rankzero.distributed.process.cores import usable_cores; print(sorted(usable_cores()))"
    cpu = max(os.sched_getaffinity(0))
    result = subprocess.run(["taskset", "-c", str(cpu), sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == str([cores._core_of(cpu)]), result.stderr
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        (tmp_path / f"cpu{cpu}/topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}/topology/thread_siblings_list").write_text(f"{siblings}\n")
    cores._core_of.cache_clear()
    monkeypatch.setattr(cores, "TOPOLOGY", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    assert usable_cores() == {0, 1}
    cores._core_of.cache_clear()


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
        assert available_memory(folder) > psutil.virtual_memory().total // 100
    else:
        assert available_memory(folder) == available
