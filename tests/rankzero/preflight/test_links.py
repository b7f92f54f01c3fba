from itertools import combinations

import pytest
import torch

from rankzero.preflight.check import FAIL, OK, SKIPPED, WARN
from rankzero.preflight.links import _slow_hosts, all_rounds, check_links, ring_rounds, slow_links


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
def test_all_rounds_contain_each_pair_once_and_each_rank_at_most_once_in_a_round(count):
    rounds = all_rounds(range(count))
    assert sorted(tuple(sorted(pair)) for pairs in rounds for pair in pairs) == list(combinations(range(count), 2))
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks))


@pytest.mark.parametrize(("ends", "pairs"), [([0, 4], 1), ([0, 4, 8], 3), ([0, 4, 8, 12], 4), (range(7), 7)])
def test_a_ring_connects_each_host_with_the_next(ends, pairs):
    rounds = ring_rounds(list(ends))
    assert sum(map(len, rounds)) == pairs
    for group in rounds:
        ranks = [rank for pair in group for rank in pair]
        assert len(ranks) == len(set(ranks))


def test_slow_links_are_those_below_the_threshold_or_half_of_the_median():
    assert slow_links({(0, 1): 10.0, (1, 2): 10.0, (2, 3): 3.0, (3, 0): 0.1}, 1.0) == [(3, 0), (2, 3)]
    assert slow_links({(0, 1): 0.1}, 1.0) == [(0, 1)]
    assert slow_links({(0, 1): 2.0, (1, 2): 1.5}, 1.0) == []


def test_a_host_with_only_slow_links_is_named():
    gbps = {(0, 1): 0.1, (0, 2): 0.1, (1, 2): 10.0}
    assert _slow_hosts([(0, 1), (0, 2)], gbps, ["n1", "n2", "n3"]) == ["n1"]
    assert _slow_hosts([(0, 1)], {(0, 1): 0.1}, ["n1", "n2"]) == []


def measure(coordinator, mode, warn_gbps):
    return check_links(coordinator, torch.device("cpu"), mode, warn_gbps, 0.0)


@pytest.mark.parametrize(
    ("size", "mode", "pairs"), [(2, "quick", [[0, 1]]), (3, "all", [[0, 1], [0, 2], [1, 2]]), (3, "quick", None)]
)
def test_pairs_of_ranks_are_measured(on_ranks, size, mode, pairs):
    for check in on_ranks(measure, size, mode, 0.0):
        measured = sorted(sorted(pair["ranks"]) for pair in check.values["pairs"])
        assert measured == (pairs or [[0, 1], [0, 2], [1, 2]]) and "median" in check.summary
        assert all(pair["gbps"] > 0 for pair in check.values["pairs"])


def measure_two_hosts(coordinator, warn_gbps, fail_gbps):
    coordinator.members = [
        member._replace(host=f"n{rank}", node_rank=rank) for rank, member in enumerate(coordinator.members)
    ]
    coordinator.hosts = [member.host for member in coordinator.members]
    return check_links(coordinator, torch.device("cpu"), "quick", warn_gbps, fail_gbps)


@pytest.mark.parametrize(
    ("limits", "status"), [((1e6, 0.0), WARN), ((1e6, 1e6), FAIL), ((0.0, 1e6), FAIL), ((0.0, 0.0), OK)]
)
def test_a_link_between_hosts_is_compared_with_the_thresholds(on_ranks, limits, status):
    for check in on_ranks(measure_two_hosts, 2, *limits):
        assert check.status == status and bool(check.advice) is (status != OK)
        assert status == OK or check.details[0].startswith("n0 - n1 (ranks 0 and 1): ")


def test_slow_pairs_on_one_host_are_a_warning(on_ranks):
    for check in on_ranks(measure, 2, "quick", 1e6):
        assert check.status == WARN and "(ranks 0 and 1): " in check.details[0]


def test_no_pair_is_measured_with_pairs_off(on_ranks):
    (check,) = on_ranks(measure, 1, "off", 1.0)
    assert check.status == SKIPPED
