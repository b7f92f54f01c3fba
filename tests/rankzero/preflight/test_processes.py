import pytest

from rankzero.distributed.devices import WorldInfo
from rankzero.preflight.check import FAIL, OK, SKIPPED, WARN
from rankzero.preflight.processes import check_imports, check_launcher, check_processes


def run_check_launcher(coordinator, interface):
    with pytest.MonkeyPatch.context() as patch:
        if coordinator.launch.rank == 1:
            patch.setenv("GLOO_SOCKET_IFNAME", interface)
        return check_launcher(coordinator, WorldInfo("cpu", size=2))


def test_a_setting_of_one_rank_is_named_on_all_ranks(on_ranks):
    for check in on_ranks(run_check_launcher, 2, "^lo"):
        assert check.status == FAIL and "rank 1" in check.details[0] and "rank 0" not in check.details[0]
    checks = on_ranks(run_check_launcher, 2, "lo")
    for check in checks:
        assert check.status == OK and not check.details and "1 thread and " in check.summary
    assert len(checks[0].values["ranks"]) == 2  # the report of rank zero


def run_check_processes(coordinator, seconds):
    return check_processes(coordinator, WorldInfo("cpu", size=coordinator.launch.world_size), seconds)


def test_all_processes_are_listed(on_ranks):
    (check, _) = on_ranks(run_check_processes, 2, 1.25)
    assert check.summary == "all 2 processes on 1 host have connected, after 1.2 s"
    assert [row["rank"] for row in check.values["ranks"]] == [0, 1]
    assert all(f"rank {rank} on " in line and ", cpu, process " in line for rank, line in enumerate(check.details))


def test_a_single_process_is_named(on_ranks):
    (check,) = on_ranks(run_check_processes, 1, None)
    assert check.summary.startswith("one process on ")


def run_check_imports(coordinator, seconds):
    return check_imports(coordinator, None if seconds is None else seconds * (coordinator.launch.rank + 1))


@pytest.mark.parametrize(("seconds", "status"), [(5.0, OK), (15.0, WARN)])
def test_the_slowest_import_is_named(on_ranks, seconds, status):
    for check in on_ranks(run_check_imports, 2, seconds):
        assert check.status == status and "the slowest: rank 1" in check.summary


def test_an_unknown_time_of_import_is_skipped(on_ranks):
    (check,) = on_ranks(run_check_imports, 1, None)  # several ranks that exchange nothing may exit while others connect
    assert check.status == SKIPPED
