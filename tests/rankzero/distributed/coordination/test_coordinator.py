import json
import pickle
import re
import socket
from dataclasses import asdict
from unittest.mock import Mock

import pytest
import torch
from torch.distributed import HashStore

from rankzero.distributed.coordination import coordinator
from rankzero.distributed.coordination.coordinator import Coordinator, Outcomes
from rankzero.distributed.environments.launch import Launch, RequestedWorld
from rankzero.distributed.world import World
from rankzero.messages import AnotherRankFailed, CannotStart, RequestError, is_peer_failure
from running import on_each_rank, wait_until


def refused_by(coordinators, *ranks, found="no such file here"):
    """Returns the errors of all ranks after some of them have refused to start."""

    def work(member):
        if member.world.rank in ranks:
            raise RequestError("a", found.format(member.world.rank), "c")

    return on_each_rank(coordinators, lambda member: member.run_on_all_ranks(lambda: work(member)))


def test_rank_zero_decides_on_the_values_of_all_ranks_or_names_a_missing_rank(coordinators):
    gathered = on_each_rank(coordinators, lambda member: member.decide({"rank": member.world.rank}, list))
    assert gathered == [[{"rank": rank} for rank in range(3)]] * 3
    coordinators[0].timeout = 0.3
    with pytest.raises(AnotherRankFailed, match=r"rank 1 on \S+ was still starting after 0.3 s"):
        coordinators[0].decide(1, list)


def test_a_single_process_needs_no_other_rank_and_keeps_an_existing_process_group():
    coordinator_of_one = Coordinator(World(), RequestedWorld())
    assert coordinator_of_one.decide([1], list) == [[1]] and coordinator_of_one.run_on_all_ranks(lambda: 7) == 7
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        group = torch.distributed.group.WORLD
        coordinator_of_one.init_process_group("gloo", torch.device("cpu"), None)
        assert torch.distributed.group.WORLD is group
    finally:
        torch.distributed.destroy_process_group()
        coordinator_of_one.control_channel.close()


def test_a_refusal_is_raised_on_all_ranks_and_reported_by_the_lowest_refusing_rank(coordinators):
    errors = refused_by(coordinators, 0, 1, 2)
    assert all(isinstance(error, CannotStart) for error in errors)
    assert [error.reported_elsewhere for error in errors] == [False, True, True]
    errors = refused_by(coordinators, 1)
    assert [error.reported_elsewhere for error in errors] == [True, False, True]
    assert "rank 1 on " in str(errors[1]) and "no such file here" in str(errors[1])


def test_each_refusing_rank_names_its_own_host(coordinators):
    for member in coordinators:  # as if the other ranks were on other machines
        peers = member.world.peers
        peers.update((rank, peer._replace(host=f"host{rank}")) for rank, peer in list(peers.items()))
    errors = refused_by(coordinators, 1, 2, found="refused by {}")
    assert all(f"rank {rank} on host{rank}" in str(errors[rank]) for rank in (1, 2))
    assert [error.reported_elsewhere for error in errors] == [True, False, False]
    assert str(errors[0]).startswith("  rank 1 on host1:\n"), "the lowest of the refusing ranks"


def test_an_exception_makes_the_other_ranks_fail_which_name_the_lowest_rank_with_one(coordinators):
    def work(member):
        if member.world.rank:
            raise KeyError(f"bug {member.world.rank}")

    first, *others = on_each_rank(coordinators, lambda member: member.run_on_all_ranks(lambda: work(member)))
    assert all(isinstance(error, KeyError) for error in others) and is_peer_failure(first)
    assert isinstance(first, AnotherRankFailed) and re.match(r"rank 1 on \S+ failed: KeyError\('bug 1'\)", str(first))


def test_a_refusal_of_all_ranks_in_the_with_block_is_reported_once(coordinators):
    def refuse(member):
        with member:
            raise CannotStart("the same on every rank")

    assert sorted(error.reported_elsewhere for error in on_each_rank(coordinators, refuse)) == [False, True, True]


def test_processes_are_shared_with_host_and_process_id(coordinators):
    on_each_rank(coordinators, lambda member: member.share_peers())
    found = [{rank: (peer.host, peer.pid) for rank, peer in c.world.peers.items()} for c in coordinators]
    assert [*found[0]] == [0, 1, 2] and found == found[:1] * 3


@pytest.mark.parametrize(("auth", "requires_key"), [("required", True), ("auto", False)])
def test_a_rank_of_one_machine_that_torchruns_store_leads_elsewhere_needs_the_key(monkeypatch, auth, requires_key):
    store = HashStore()
    store.set("rank zero", '["192.0.2.1", 4444]')
    launch = Launch(launcher="torchrun", rank=1, local_rank=1, world_size=2, local_world_size=2, uses_agent_store=True)
    find, member = Mock(side_effect=AnotherRankFailed), object.__new__(Coordinator)
    member._start_timeout = 10
    monkeypatch.setattr(coordinator, "find_requested_ranks", find)
    with pytest.raises(AnotherRankFailed):
        member._find_ranks(store, launch, RequestedWorld(auth=auth))
    assert find.call_args.args[1:] == (launch._replace(address="192.0.2.1", port=4444), requires_key, None)


@pytest.mark.parametrize("refusing", [0, 1])
def test_a_rank_that_loses_contact_to_a_refusing_rank_reports_nothing(coordinators, refusing):
    def work(member):
        channel = member.control_channel
        with member:
            if member.world.rank == refusing:
                raise CannotStart("only here")
            wait_until(channel.refusals if refusing else lambda: channel._is_finished)  # rank zero has left
            raise RuntimeError("[gloo/x.cc:81] Connection closed by peer")

    errors = on_each_rank(coordinators, work)
    assert all(isinstance(error, CannotStart) for error in errors)
    assert [error.reported_elsewhere for error in errors] == [rank != refusing for rank in range(3)]


@pytest.mark.parametrize("has_refused", [True, False])
@pytest.mark.parametrize("is_remote", [True, False])
def test_a_refusal_of_another_rank_has_its_name_and_whether_it_is_on_another_machine(has_refused, is_remote):
    host = "elsewhere" if is_remote else socket.gethostname()
    outcome = {"refused": "  a\n  b", "summary": "a"}
    outcomes = Outcomes.of([{}, outcome, outcome], f"rank {{}} on {host}".format)
    outcomes = Outcomes(**json.loads(json.dumps(asdict(outcomes))))
    refusal = outcomes.refusal(CannotStart("  a\n  b") if has_refused else None, 2)
    assert refusal.reported_elsewhere and refusal.is_remote == is_remote
    if not has_refused:
        refusal = pickle.loads(pickle.dumps(refusal))
        assert str(refusal) == f"  rank 1 on {host}:\n  a\n  b"
        assert refusal.summary == f"rank 1 on {host} cannot start: a"
