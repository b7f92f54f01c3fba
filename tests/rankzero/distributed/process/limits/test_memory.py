import psutil
import pytest

from rankzero.distributed.process.limits.memory import available_memory

V1 = "31 23 0:28 / {mount} rw - cgroup cgroup rw,memory"
V2 = "41 31 0:38 / {mount} rw,relatime shared:5 master:1 - cgroup2 cgroup2 rw,nsdelegate"
STATISTICS = "anon 900\ninactive_file 200\ntotal_inactive_file 300\n"


@pytest.mark.parametrize(
    ("mount", "membership", "files", "available"),
    [
        (V2, "0::/job/step", {"job/memory.max": "5000\n", "job/memory.current": "1000\n"}, 4200),
        (V2, "0::/job/step", {"job/memory.max": "5000\n", "job/memory.current": "5500\n"}, 0),
        (V2, "0::/job/step", {"job/memory.max": "max\n", "job/memory.current": "1000\n"}, None),
        (V2, "0::/job/step", {}, None),
        (V1, "4:memory:/job", {"job/memory.limit_in_bytes": "5000\n", "job/memory.usage_in_bytes": "1000\n"}, 4300),
        (V1, "4:pids:/job", {"job/memory.limit_in_bytes": "5000\n", "job/memory.usage_in_bytes": "1\n"}, None),
    ],
)
def test_the_memory_limit_of_an_enclosing_cgroup_applies(write_process_files, mount, membership, files, available):
    folder = write_process_files(mount, membership, {**files, "job/memory.stat": STATISTICS})
    if available is None:
        assert available_memory(folder) > psutil.virtual_memory().total // 100
    else:
        assert available_memory(folder) == available
