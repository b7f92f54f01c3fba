import shutil
from types import SimpleNamespace

import pytest
import torch

from rankzero.preflight import training
from rankzero.preflight.check import FAIL, OK, WARN
from rankzero.preflight.training import check_data, check_steps, check_workers


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


WORKERS = [
    (2, 10**7, OK, ""),
    (3, 10**9, WARN, "has 6 loader processes on 4 cores"),
    (2, 7 * 10**6, WARN, "has 7 MB free, and the loader processes of this host need up to 8 MB"),
    (2, 3 * 10**6, FAIL, "has 3 MB free, and the loader processes of this host need up to 8 MB"),
]
"""Loader processes of a rank, free shared memory, and the status and details of the check."""


def run_check_workers(coordinator):
    checks, rank = [], coordinator.world.rank
    for workers, free, *_ in WORKERS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda folder, free=free: SimpleNamespace(free=free))
            patch.setattr(training, "usable_cores", lambda: frozenset({2 * rank, 2 * rank + 1}))
            checks.append(check_workers(coordinator, workers, 4 * 10**6))
    return checks


def test_the_loader_processes_of_a_host_are_compared_with_its_cores_and_its_shared_memory(on_ranks):
    for checks in on_ranks(run_check_workers, 2):
        for check, (_, _, status, text) in zip(checks, WORKERS, strict=True):
            assert check.status == status and (text in check.details[0] if text else not check.details)
            assert bool(check.advice) is (status != OK)
        assert checks[1].advice == ["--data.num_workers 2, or more cores per rank"]


NO_GROUP = "Default process group has not been initialized, please make sure to call init_process_group."
STEPS = [
    ((0.010, 0.011, 0.010), OK, None),
    ((0.010, 0.030, 0.010), WARN, "takes 30.0 ms, 3.0 times the median"),
    ((0.010, "CUDA out of memory", 0.010), FAIL, "RuntimeError: CUDA out of memory"),
    ((0.010, "wrong shape", 0.010), FAIL, "RuntimeError: wrong shape"),
    ((0.010, NO_GROUP, 0.010), WARN, "process group has not been initialized"),
    ((0.010, None, 0.010), OK, None),
    ((None, None, None), WARN, None),
]
"""The seconds or the error of each rank, and the status and details of the check."""


def run_check_steps(coordinator):
    def trial_of(result):
        def train():
            if isinstance(result, str):
                raise RuntimeError(result)
            return {"seconds": result, "peak_bytes": 10**9}

        return SimpleNamespace(train=train, device=torch.device("cpu"))

    return [check_steps(coordinator, trial_of(results[coordinator.world.rank])) for results, *_ in STEPS]


def test_slow_and_failing_ranks_are_named(on_ranks):
    for checks in on_ranks(run_check_steps, 3):
        for check, (_, status, text) in zip(checks, STEPS, strict=True):
            assert check.status == status
            assert not check.details if text is None else check.details[0].startswith("rank 1 ")
            assert text is None or text in check.details[0]
            assert status != FAIL or ("--batch_size" in check.advice[0]) is ("memory" in text)
