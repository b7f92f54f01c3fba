import pytest
import torch
import torch.distributed as dist

from rankzero.preflight import bandwidth
from rankzero.preflight.bandwidth import SIZES, check_collectives, step_seconds
from rankzero.preflight.check import FAIL, OK, WARN

ROWS = [{"bytes": 1 << 20, "seconds": 0.01}, {"bytes": 1 << 26, "seconds": 0.5}]


@pytest.mark.parametrize(
    ("count", "seconds"), [(1 << 20, 0.01), (1 << 27, 1.0), (1000, 0.01), ((1 << 19) + (1 << 25), 0.255)]
)
def test_the_time_of_a_step_is_interpolated_between_the_measured_sizes(count, seconds):
    assert step_seconds(count, ROWS) == pytest.approx(seconds)
    assert SIZES[0] == 1 << 10 and SIZES[-1] == 1 << 28


def measure(coordinator, cases):
    """Measures collectives for each case: both thresholds, the hosts, and the name of a collective to corrupt."""
    launch, checks = coordinator.launch, []
    for warn_gbps, fail_gbps, hosts, *corrupted in cases:
        coordinator.launch = launch._replace(num_nodes=hosts)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bandwidth, "SIZES", (1 << 10, 1 << 16))
            patch.setattr(bandwidth, "SECONDS_PER_SIZE", 0.01)
            for name in corrupted:
                patch.setattr(dist, name, lambda *_: None)
            device = torch.device("cpu")
            checks.append(check_collectives(coordinator, device, warn_gbps, fail_gbps, 100_000, "MLP"))
    return checks


LIMITS = {(0, 0, 2): OK, (1e6, 0, 2): WARN, (1e6, 1e6, 2): FAIL, (0, 1e6, 2): FAIL, (0, 1e6, 1): WARN}
"""Threshold of a warning, threshold of a failure, and number of hosts -> status."""
CORRUPTED = ["all_gather", "broadcast", "all_reduce"]


def test_the_bus_bandwidth_is_compared_with_the_thresholds_and_wrong_results_are_named(on_ranks):
    for checks in on_ranks(measure, 2, [*LIMITS, *((0, 0, 1, name) for name in CORRUPTED)]):
        for check, status in zip(checks, LIMITS.values(), strict=False):
            assert check.status == status and not check.blocks
            rows = check.values["all_reduce"]
            assert [row["bytes"] for row in rows] == [1 << 10, 1 << 16]
            for row in rows:
                assert row["algorithm_gbps"] == pytest.approx(8e-9 * row["bytes"] / row["seconds"])
                assert row["bus_gbps"] == pytest.approx(row["algorithm_gbps"])  # 2 (n - 1) / n is 1 for two ranks
            assert check.details[-1].startswith("MLP sends 0.1 MB per step: ")
            assert bool(check.advice) is (status != OK)
        for check, name in zip(checks[len(LIMITS) :], CORRUPTED, strict=True):
            assert check.status == FAIL and check.blocks and f"wrong result of {name}" in check.details[0]


def test_the_bus_bandwidth_of_three_ranks_is_four_thirds_of_the_algorithm_bandwidth(on_ranks):
    for (check,) in on_ranks(measure, 3, [(0, 0, 1)]):
        row = check.values["all_reduce"][0]
        assert row["bus_gbps"] == pytest.approx(row["algorithm_gbps"] * 4 / 3)


def measure_with_little_memory(coordinator):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bandwidth, "SECONDS_PER_SIZE", 0.01)
        patch.setattr(bandwidth, "MEMORY_SHARE", 1e-5 * (coordinator.launch.rank + 1))
        return check_collectives(coordinator, torch.device("cpu"), 0, 0, 100_000, "MLP")


def test_the_buffers_fit_into_the_available_memory_of_each_machine(on_ranks):
    first, second = on_ranks(measure_with_little_memory, 2)
    sizes, others = ([row["bytes"] for row in check.values["all_reduce"]] for check in (first, second))
    assert sizes == others and sizes[-1] < 1 << 22
