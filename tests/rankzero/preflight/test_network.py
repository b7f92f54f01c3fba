from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from rankzero.preflight import network
from rankzero.preflight.check import FAIL, OK, WARN
from rankzero.preflight.network import check_collectives, check_message_passing


def exchange(coordinator):
    """Exchanges messages, of which rank 2 sends right and then wrong ones; returns the checks and the printed lines."""
    results = []
    for corrupts in (False, coordinator.world.rank == 2):
        lines = []
        with pytest.MonkeyPatch.context() as patch:
            if corrupts:
                patch.setattr(network, "_message", lambda number, device: torch.zeros(network.VALUES))
            check = check_message_passing(coordinator, "gloo", dist.group.WORLD, torch.device("cpu"), lines.append)
        results.append((check, lines))
    return results


def test_every_rank_receives_data_each_receipt_is_printed_once_and_one_that_receives_wrong_data_is_named(on_ranks):
    for rank, ((right, lines), (wrong, _)) in enumerate(on_ranks(exchange, 3)):
        assert right.status == OK and not right.blocks and len(right.values["round_trips"]) == 2
        assert [line.split(" on ")[0] for line in lines] == (["rank 1", "rank 2"] if rank == 0 else [])
        assert wrong.status == FAIL and wrong.blocks
        (line,) = wrong.details
        assert line.startswith("ranks 0, 2 (") and "differs" in line, wrong


ROWS = [{"bytes": 1 << 20, "seconds": 0.01}, {"bytes": 1 << 26, "seconds": 0.5}]


def test_the_time_of_a_step_is_interpolated_between_the_measured_sizes():
    for count, seconds in ((1 << 20, 0.01), (1 << 27, 1.0), (1000, 0.01), ((1 << 19) + (1 << 25), 0.255)):
        assert network.step_seconds(count, ROWS) == pytest.approx(seconds)
    assert network.SIZES[0] == 1 << 10 and network.SIZES[-1] == 1 << 28


def measure(coordinator, cases):
    """Measures collectives for each case: both thresholds, the hosts, and the name of a collective to corrupt."""
    world, checks = coordinator.world, []
    for warn_gbps, fail_gbps, hosts, *corrupted in cases:
        coordinator.world = replace(world, launch=world.launch._replace(num_nodes=hosts))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(network, "SIZES", (1 << 10, 1 << 16))
            patch.setattr(network, "SECONDS_PER_SIZE", 0.01)
            for name in corrupted:
                patch.setattr(dist, name, lambda *_: None)
            checks.append(check_collectives(coordinator, torch.device("cpu"), warn_gbps, fail_gbps, 100_000, "MLP"))
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
        patch.setattr(network, "SECONDS_PER_SIZE", 0.01)
        patch.setattr(network, "MEMORY_SHARE", 1e-5 * (coordinator.world.rank + 1))
        return check_collectives(coordinator, torch.device("cpu"), 0, 0, 100_000, "MLP")


def test_the_buffers_fit_into_the_available_memory_of_each_machine(on_ranks):
    first, second = on_ranks(measure_with_little_memory, 2)
    sizes, others = ([row["bytes"] for row in check.values["all_reduce"]] for check in (first, second))
    assert sizes == others and sizes[-1] < 1 << 22


def ranks_of(rounds):
    """Returns the ranks of all rounds as pairs; fails if a rank is more than once in a round."""
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks))
    return sorted(tuple(sorted(pair)) for pairs in rounds for pair in pairs)


def test_all_rounds_contain_each_pair_once_and_a_ring_connects_each_host_with_the_next():
    for count in (2, 3, 4, 5, 8):
        assert ranks_of(network.all_rounds(range(count))) == list(combinations(range(count), 2))
    for ends, pairs in (([0, 4], 1), ([0, 4, 8], 3), ([0, 4, 8, 12], 4), (range(7), 7)):
        assert len(ranks_of(network.ring_rounds(list(ends)))) == pairs


def test_links_below_the_threshold_or_half_of_the_median_are_slow_and_a_host_with_only_slow_links_is_named():
    assert network.slow_links({(0, 1): 10.0, (1, 2): 10.0, (2, 3): 3.0, (3, 0): 0.1}, 1.0) == [(3, 0), (2, 3)]
    assert network.slow_links({(0, 1): 0.1}, 1.0) == [(0, 1)]
    assert network.slow_links({(0, 1): 2.0, (1, 2): 1.5}, 1.0) == []
    assert network._slow_hosts([(0, 1), (0, 2)], {(0, 1): 0.1, (0, 2): 0.1, (1, 2): 10.0}, ["n1", "n2", "n3"]) == ["n1"]
    assert network._slow_hosts([(0, 1)], {(0, 1): 0.1}, ["n1", "n2"]) == []


def measure_links(coordinator, cases):
    """Measures the links for each case: mode, lowest rate without a warning, lowest without a failure, hosts."""
    peers, checks = coordinator.world.peers, []
    for mode, warn_gbps, fail_gbps, hosts in cases:
        nodes = {rank: rank if hosts > 1 else 0 for rank in peers}
        coordinator.world.peers = {
            rank: peer._replace(host=f"n{nodes[rank]}", node_rank=nodes[rank]) for rank, peer in peers.items()
        }
        checks.append(network.check_links(coordinator, torch.device("cpu"), mode, warn_gbps, fail_gbps))
    return checks


def test_all_pairs_of_three_ranks_are_measured(on_ranks):
    for checks in on_ranks(measure_links, 3, [(mode, 0.0, 0.0, 1) for mode in ("all", "quick")]):
        for check in checks:
            assert sorted(sorted(pair["ranks"]) for pair in check.values["pairs"]) == [[0, 1], [0, 2], [1, 2]]
            assert "median" in check.summary and all(pair["gbps"] > 0 for pair in check.values["pairs"])


def test_links_are_compared_with_the_thresholds(on_ranks):
    limits = [(1e6, 0.0), (1e6, 1e6), (0.0, 1e6), (0.0, 0.0)]
    cases = [*(("quick", *limit, 2) for limit in limits), ("quick", 1e6, 0.0, 1)]
    for *checks, of_one_host in on_ranks(measure_links, 2, cases):
        assert [check.status for check in checks] == [WARN, FAIL, FAIL, OK]
        for check in (*checks, of_one_host):
            (pair,) = check.values["pairs"]
            assert sorted(pair["ranks"]) == [0, 1] and pair["gbps"] > 0 and "median" in check.summary
        for check in checks:
            assert bool(check.advice) is (check.status != OK)
            assert check.status == OK or check.details[0].startswith("n0 - n1 (ranks 0 and 1): ")
        assert of_one_host.status == WARN and "(ranks 0 and 1): " in of_one_host.details[0]


def exchange_as_on_gpus(coordinator):
    with pytest.MonkeyPatch.context() as patch:
        on_cpu = SimpleNamespace(
            zeros=lambda size, device: torch.zeros(size), tensor=lambda values, device: torch.tensor(values)
        )
        patch.setattr(network, "torch", on_cpu)
        patch.setattr(network, "synchronize", lambda device: None)
        patch.setattr(network, "MAX_SECONDS", 0.0)  # gloo completes its messages in `wait`
        patch.setattr(network, "MESSAGE_BYTES_ON_GPU", 1 << 16)
        return network._exchange((0, 1), coordinator.world.rank, SimpleNamespace(type="cuda"))


def test_both_ends_of_a_link_between_gpus_exchange_the_same_messages(on_ranks):
    assert all(gbps > 0 for gbps in on_ranks(exchange_as_on_gpus, 2))
