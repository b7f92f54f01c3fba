import pytest

from rankzero.distributed.devices import WorldInfo
from rankzero.preflight.check import FAIL, OK, SKIPPED, WARN
from rankzero.preflight.processes import check_imports, check_launcher, check_processes


def run_check_launcher(coordinator):
    checks = []
    for interface in ("^lo", "lo"):
        with pytest.MonkeyPatch.context() as patch:
            if coordinator.launch.rank == 1:
                patch.setenv("GLOO_SOCKET_IFNAME", interface)
            checks.append(check_launcher(coordinator, WorldInfo("cpu", size=2)))
    return checks


def test_a_setting_of_one_rank_is_named_on_all_ranks(on_ranks):
    results = on_ranks(run_check_launcher, 2)
    for wrong, right in results:
        assert wrong.status == FAIL and "rank 1" in wrong.details[0] and "rank 0" not in wrong.details[0]
        assert right.status == OK and not right.details and "1 thread and " in right.summary
    assert len(results[0][1].values["ranks"]) == 2  # the report of rank zero


def run_check_processes(coordinator, seconds):
    return check_processes(coordinator, WorldInfo("cpu", size=coordinator.launch.world_size), seconds)


def test_all_processes_are_listed(on_ranks):
    check, _ = on_ranks(run_check_processes, 2, 1.25)
    assert check.summary == "all 2 processes on 1 host have connected, after 1.2 s"
    assert [row["rank"] for row in check.values["ranks"]] == [0, 1]
    assert all(f"rank {rank} on " in line and ", cpu, process " in line for rank, line in enumerate(check.details))
    (check,) = on_ranks(run_check_processes, 1, None)
    assert check.summary.startswith("one process on ")


def run_check_imports(coordinator, times):
    rank = coordinator.launch.rank
    return [check_imports(coordinator, None if seconds is None else seconds * (rank + 1)) for seconds in times]


def test_the_slowest_import_is_named_and_an_unknown_time_is_skipped(on_ranks):
    for *known, unknown in on_ranks(run_check_imports, 2, [5.0, 15.0, None]):
        assert [check.status for check in known] == [OK, WARN] and unknown.status == SKIPPED
        assert all("the slowest: rank 1" in check.summary for check in known)
