import shutil
from collections import namedtuple

import pytest

from rankzero.preflight import loading
from rankzero.preflight.check import FAIL, OK, WARN
from rankzero.preflight.loading import check_data, check_workers

Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(
    ("fingerprints", "errors", "status", "text"),
    [
        ([{"samples": "10"}] * 2, {}, OK, "10 samples, the same on all ranks"),
        ([{}, {}], {}, OK, "readable; the data set has no fingerprint"),
        ([{"samples": "10"}, {"samples": "11"}], {}, FAIL, "samples: 10 on rank 0 (n1); 11 on rank 1 (n2)"),
        ([{"a": "1"}, {}], {}, FAIL, "a: 1 on rank 0 (n1); missing on rank 1 (n2)"),
        ([], {1: "FileNotFoundError: x\nmore"}, FAIL, "rank 1 (n2): FileNotFoundError: x"),
    ],
)
def test_the_data_of_all_ranks_is_compared(fingerprints, errors, status, text):
    check = check_data(fingerprints, errors, ["n1", "n2"])
    assert check.status == status and (check.details[0] if check.details else check.summary) == text
    assert bool(check.advice) is (status != OK)


def run_check_workers(coordinator, workers, prefetched_bytes, free):
    own_cores = {coordinator.launch.rank * 2, coordinator.launch.rank * 2 + 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: Usage(free, 0, free))
        patch.setattr(loading, "usable_cores", lambda: frozenset(own_cores))
        return check_workers(coordinator, workers, prefetched_bytes)


@pytest.mark.parametrize(
    ("workers", "prefetched_bytes", "free", "status", "text"),
    [
        (2, 4 * 10**6, 10**7, OK, ""),
        (3, 4 * 10**6, 10**9, WARN, "has 6 loader processes on 4 cores"),
        (2, 4 * 10**6, 7 * 10**6, WARN, "has 7 MB free, and the loader processes of this host need up to 8 MB"),
        (2, 4 * 10**6, 3 * 10**6, FAIL, "has 3 MB free, and the loader processes of this host need up to 8 MB"),
    ],
)
def test_the_loader_processes_of_a_host_are_compared_with_its_cores_and_its_shared_memory(
    on_ranks, workers, prefetched_bytes, free, status, text
):
    for check in on_ranks(run_check_workers, 2, workers, prefetched_bytes, free):
        assert check.status == status and (text in check.details[0] if text else not check.details)
        assert bool(check.advice) is (status != OK)
        if workers == 3:
            assert check.advice == ["--data.num_workers 2, or more cores per rank"]
