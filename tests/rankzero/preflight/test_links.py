from itertools import combinations

import pytest
import torch

from rankzero.preflight.check import FAIL, OK, SKIPPED, WARN
from rankzero.preflight.links import _slow_hosts, all_rounds, check_links, ring_rounds, slow_links


def ranks_of(rounds):
    """Returns the ranks of all rounds as pairs; fails if a rank is more than once in a round."""
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks))
    return sorted(tuple(sorted(pair)) for pairs in rounds for pair in pairs)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
def test_all_rounds_contain_each_pair_once_and_each_rank_at_most_once_in_a_round(count):
    assert ranks_of(all_rounds(range(count))) == list(combinations(range(count), 2))


@pytest.mark.parametrize(("ends", "pairs"), [([0, 4], 1), ([0, 4, 8], 3), ([0, 4, 8, 12], 4), (range(7), 7)])
def test_a_ring_connects_each_host_with_the_next(ends, pairs):
    assert len(ranks_of(ring_rounds(list(ends)))) == pairs


def test_links_below_the_threshold_or_half_of_the_median_are_slow_and_a_host_with_only_slow_links_is_named():
    assert slow_links({(0, 1): 10.0, (1, 2): 10.0, (2, 3): 3.0, (3, 0): 0.1}, 1.0) == [(3, 0), (2, 3)]
    assert slow_links({(0, 1): 0.1}, 1.0) == [(0, 1)]
    assert slow_links({(0, 1): 2.0, (1, 2): 1.5}, 1.0) == []
    gbps = {(0, 1): 0.1, (0, 2): 0.1, (1, 2): 10.0}
    assert _slow_hosts([(0, 1), (0, 2)], gbps, ["n1", "n2", "n3"]) == ["n1"]
    assert _slow_hosts([(0, 1)], {(0, 1): 0.1}, ["n1", "n2"]) == []


def measure(coordinator, cases):
    """Measures the links for each case: mode, lowest rate without a warning, lowest without a failure, hosts."""
    members, checks = coordinator.members, []
    for mode, warn_gbps, fail_gbps, hosts in cases:
        nodes = [member.rank if hosts > 1 else 0 for member in members]
        coordinator.hosts = [f"n{node}" for node in nodes]
        coordinator.members = [
            member._replace(host=f"n{node}", node_rank=node) for member, node in zip(members, nodes, strict=True)
        ]
        checks.append(check_links(coordinator, torch.device("cpu"), mode, warn_gbps, fail_gbps))
    return checks


def test_all_pairs_of_three_ranks_are_measured(on_ranks):
    for checks in on_ranks(measure, 3, [(mode, 0.0, 0.0, 1) for mode in ("all", "quick")]):
        for check in checks:
            assert sorted(sorted(pair["ranks"]) for pair in check.values["pairs"]) == [[0, 1], [0, 2], [1, 2]]
            assert "median" in check.summary and all(pair["gbps"] > 0 for pair in check.values["pairs"])


def test_links_are_compared_with_the_thresholds(on_ranks):
    limits = [(1e6, 0.0), (1e6, 1e6), (0.0, 1e6), (0.0, 0.0)]
    cases = [*(("quick", *limit, 2) for limit in limits), ("quick", 1e6, 0.0, 1)]
    for *checks, of_one_host in on_ranks(measure, 2, cases):
        assert [check.status for check in checks] == [WARN, FAIL, FAIL, OK]
        for check in (*checks, of_one_host):
            (pair,) = check.values["pairs"]
            assert sorted(pair["ranks"]) == [0, 1] and pair["gbps"] > 0 and "median" in check.summary
        for check in checks:
            assert bool(check.advice) is (check.status != OK)
            assert check.status == OK or check.details[0].startswith("n0 - n1 (ranks 0 and 1): ")
        assert of_one_host.status == WARN and "(ranks 0 and 1): " in of_one_host.details[0]


def test_no_pair_is_measured_with_pairs_off(on_ranks):
    ((check,),) = on_ranks(measure, 1, [("off", 1.0, 0.0, 1)])
    assert check.status == SKIPPED
