import pytest

from rankzero.preflight.check import FAIL, OK, SKIPPED, WARN
from rankzero.preflight.processes import check_imports, check_launcher, check_processes
from running import world_of


def run_checks(coordinator):
    """Returns the results of the launcher with a wrong and a right setting of rank 1, and those of three imports."""
    rank, of_launcher = coordinator.world.rank, []
    for interface in ("^lo", "lo"):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setenv("GLOO_SOCKET_IFNAME", interface)
            of_launcher.append(check_launcher(coordinator, world_of("cpu", size=2)))
    of_imports = [check_imports(coordinator, seconds and seconds * (rank + 1)) for seconds in (5.0, 15.0, None)]
    return of_launcher, of_imports


def test_a_setting_of_one_rank_and_the_slowest_import_are_named_on_all_ranks(on_ranks):
    results = on_ranks(run_checks, 2)
    for (wrong, right), (*known, unknown) in results:
        assert wrong.status == FAIL and "rank 1" in wrong.details[0] and "rank 0" not in wrong.details[0]
        assert right.status == OK and not right.details and "1 thread and " in right.summary
        assert [check.status for check in known] == [OK, WARN] and unknown.status == SKIPPED
        assert all("the slowest: rank 1" in check.summary for check in known)
    assert len(results[0][0][1].values["ranks"]) == 2  # the report of rank zero


def run_check_processes(coordinator, seconds):
    return check_processes(coordinator, world_of("cpu", size=coordinator.world.size), seconds)


def test_all_processes_are_listed(on_ranks):
    check, _ = on_ranks(run_check_processes, 2, 1.25)
    assert check.summary == "all 2 processes on 1 host have connected, after 1.2 s"
    assert [row["rank"] for row in check.values["ranks"]] == [0, 1]
    assert all(f"rank {rank} on " in line and ", cpu, process " in line for rank, line in enumerate(check.details))
    (check,) = on_ranks(run_check_processes, 1, None)
    assert check.summary.startswith("one process on ")
