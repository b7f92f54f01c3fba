"""Ranks are threads here; each has its own client of the same real store."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rankzero.distributed.coordination import coordinator
from rankzero.distributed.coordination.coordinator import Coordinator
from rankzero.distributed.environments.launch import Launch, RequestedWorld
from rankzero.distributed.rendezvous.client import rendezvous
from rankzero.distributed.rendezvous.peers import Members
from rankzero.distributed.rendezvous.result import RendezvousResult
from rankzero.messages import AnotherRankFailed, CannotStart, RequestError, is_peer_failure
from running import reserved_port

REQUESTED = RequestedWorld(start_timeout=10)


@pytest.fixture
def coordinators(monkeypatch):
    monkeypatch.setattr(coordinator.network, "use_interface", lambda requested, detected: detected)

    def make(rank):
        return Coordinator(rendezvous(launch._replace(rank=rank, local_rank=rank), 10), REQUESTED)

    with reserved_port() as port, ThreadPoolExecutor(3) as pool:
        launch = Launch(
            launcher="env", world_size=3, local_world_size=3, port=port, world_id="k", externally_created=True
        )
        started = list(pool.map(make, range(3)))
        yield started
        list(pool.map(lambda member: member.control_channel.close(), started))


def on_each_rank(coordinators, work):
    """Runs `work` on every rank and returns the results, by rank; an exception counts as a result."""

    def result_of(member):
        try:
            return work(member)
        except Exception as error:
            return error

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(result_of, coordinators))


def rank_of(member):
    return member.launch.rank


def test_all_gather_object_returns_the_values_of_all_ranks_by_rank(coordinators):
    assert (
        on_each_rank(coordinators, lambda member: member.all_gather_object({"rank": rank_of(member)}))
        == [[{"rank": r} for r in range(3)]] * 3
    )
    assert on_each_rank(coordinators, lambda member: member.all_gather_object(rank_of(member) * 2)) == [[0, 2, 4]] * 3


def test_a_coordinator_works_in_a_single_process():
    coordinator_of_one = Coordinator(RendezvousResult.without_rendezvous(Launch()), REQUESTED)
    assert coordinator_of_one.all_gather_object([1]) == [[1]] and coordinator_of_one.run_on_all_ranks(lambda: 7) == 7


def test_rank_zero_reports_a_refusal_of_all_ranks(coordinators):
    def refuse():
        raise RequestError("a", "b", "c")

    errors = on_each_rank(coordinators, lambda member: member.run_on_all_ranks(refuse))
    assert all(isinstance(error, CannotStart) for error in errors)
    assert [error.reported_elsewhere for error in errors] == [False, True, True]


def test_a_refusal_of_one_rank_is_raised_on_all_ranks_and_reported_by_that_rank(coordinators):
    def work(member):
        if rank_of(member) == 1:
            raise RequestError("a", "no such file here", "c")
        return rank_of(member)

    errors = on_each_rank(coordinators, lambda member: member.run_on_all_ranks(lambda: work(member)))
    assert [error.reported_elsewhere for error in errors] == [True, False, True]
    assert "rank 1 on " in str(errors[1]) and "no such file here" in str(errors[1])


def test_each_refusing_rank_names_its_own_host(coordinators):
    for member in coordinators:  # as if the other ranks were on other machines
        member.members = Members(peer._replace(host=f"host{peer.rank}") for peer in member.members)

    def work(member):
        if rank_of(member) > 0:
            raise RequestError("a", f"refused by {rank_of(member)}", "c")

    errors = on_each_rank(coordinators, lambda member: member.run_on_all_ranks(lambda: work(member)))
    assert all(f"rank {rank} on {socket.gethostname()}" in str(errors[rank]) for rank in (1, 2))
    assert [error.reported_elsewhere for error in errors] == [True, False, False]


def test_an_exception_on_one_rank_makes_the_other_ranks_fail(coordinators):
    def work(member):
        if rank_of(member) == 2:
            raise KeyError("bug")

    errors = on_each_rank(coordinators, lambda member: member.run_on_all_ranks(lambda: work(member)))
    assert isinstance(errors[2], KeyError)
    assert all(isinstance(error, AnotherRankFailed) and "rank 2 on " in str(error) for error in errors[:2])
    assert is_peer_failure(errors[0])


def test_a_refusal_of_all_ranks_in_the_with_block_is_reported_once(coordinators):
    def refuse(member):
        with member:
            raise CannotStart("the same on every rank")

    errors = on_each_rank(coordinators, refuse)
    assert sorted(error.reported_elsewhere for error in errors) == [False, True, True]


def test_a_rank_that_loses_contact_to_a_refusing_rank_reports_nothing(coordinators):
    def work(member):
        with member:
            if rank_of(member) == 1:
                raise CannotStart("only here")
            while not member._refusals.refusing_rank():
                pass
            raise RuntimeError("Connection closed by peer")

    errors = on_each_rank(coordinators, work)
    assert all(isinstance(error, CannotStart) for error in errors)
    assert [error.reported_elsewhere for error in errors] == [True, False, True]


def test_all_gather_object_names_the_rank_that_provides_no_value_in_time(coordinators, monkeypatch):
    for member in coordinators:
        member.timeout = 0.3
    with pytest.raises(AnotherRankFailed, match=r"rank 1 on \S+ did not respond within 0.3 s"):
        coordinators[0].all_gather_object(1)


def test_an_existing_process_group_is_kept():
    coordinator_of_one = Coordinator(RendezvousResult.without_rendezvous(Launch()), REQUESTED)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        group = torch.distributed.group.WORLD
        coordinator_of_one.init_process_group("gloo", torch.device("cpu"), None)
        assert torch.distributed.group.WORLD is group
    finally:
        torch.distributed.destroy_process_group()
        coordinator_of_one.control_channel.close()
