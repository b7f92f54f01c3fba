import shutil
from collections import namedtuple

import pytest

from rankzero.preflight import room
from rankzero.preflight.check import FAIL, OK, WARN
from rankzero.preflight.room import check_step, check_workers

Usage = namedtuple("Usage", "total used free")


def run_check_workers(coordinator, workers, batch_bytes, free):
    loaded = [{"workers": workers, "batch_bytes": batch_bytes}] * 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: Usage(free, 0, free))
        patch.setattr(room, "usable_cores", lambda: frozenset(range(2)))
        return check_workers(coordinator, loaded)


@pytest.mark.parametrize(
    ("workers", "batch_bytes", "free", "status", "text"),
    [
        (2, 10**6, 10**7, OK, ""),
        (3, 10**6, 10**9, WARN, "has 3 loader processes on 2 cores"),
        (2, 10**6, 7 * 10**6, FAIL, "has 7 MB free, and the loader processes of this machine need 8 MB"),
    ],
)
def test_loader_processes_are_compared_with_cores_and_shared_memory(on_ranks, workers, batch_bytes, free, status, text):
    for check in on_ranks(run_check_workers, 2, workers, batch_bytes, free):
        assert check.status == status and (text in check.details[0] if text else not check.details)
        assert bool(check.advice) is (status != OK)


class Steps:
    """Stands for a trial."""

    def __init__(self, result):
        self.result = result

    def train(self):
        if isinstance(self.result, str):
            raise RuntimeError(self.result)
        return {"seconds": self.result, "peak_bytes": 10**9}


def run_check_step(coordinator, results):
    return check_step(coordinator, Steps(results[coordinator.launch.rank]))


@pytest.mark.parametrize(
    ("results", "status", "text"),
    [
        ((0.010, 0.011, 0.010), OK, None),
        ((0.010, 0.030, 0.010), WARN, "takes 30.0 ms, 3.0 times the median"),
        ((0.010, "CUDA out of memory", 0.010), FAIL, "RuntimeError: CUDA out of memory"),
        ((0.010, "wrong shape", 0.010), FAIL, "RuntimeError: wrong shape"),
    ],
)
def test_slow_and_failing_ranks_are_named(on_ranks, results, status, text):
    for check in on_ranks(run_check_step, 3, results):
        assert check.status == status
        assert not check.details if text is None else check.details[0].startswith("rank 1 on ")
        assert text is None or text in check.details[0]
        if status == FAIL:
            assert ("--batch_size" in check.advice[0]) is ("memory" in text)
