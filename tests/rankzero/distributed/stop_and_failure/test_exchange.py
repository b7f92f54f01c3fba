import time
from unittest.mock import Mock

import pytest

from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.stop_and_failure.exchange import Exchange
from rankzero.distributed.timers import TIMERS
from rankzero.distributed.world import Peer, World
from rankzero.messages import AnotherRankFailed, RequestError
from running import on_each_rank

SIZE = 5


@pytest.fixture
def ranks(monkeypatch):
    """The exchanges of all ranks; their messages arrive at once."""
    monkeypatch.setattr(TIMERS, "slow_poll", 0.1)
    monkeypatch.setattr(TIMERS, "late_answer", 5.0)

    def send_all(message):
        for member in created:
            if "decided" in message:
                member.receive(*message["decided"])
            else:
                member.wait_longer(message["gathering"])

    def send(rank, message):
        created[0].receive_value(rank, *message["value"])

    created = []
    for rank in range(SIZE):
        peers = {other: Peer(other, other, 0, SIZE, "a", 1) for other in range(SIZE)}
        world = World(Launch(rank=rank, world_size=SIZE), peers)
        created.append(Exchange(world, lambda message, rank=rank: send(rank, message), send_all, lambda: None))
    return created


def decide(choose, seconds=10.0, value=None, work="starting"):
    return lambda member: member.decide(value, choose, seconds, work)


def test_rank_zero_decides_on_the_values_of_all_ranks(ranks):
    decided = on_each_rank(ranks, lambda member: member.decide((member.world.rank,), lambda values: values, 10, ""))
    assert decided == [[[rank] for rank in range(SIZE)]] * SIZE
    assert on_each_rank(ranks, lambda member: member.decide(member.world.rank * 2, sum, 10, "")) == [20] * SIZE
    assert ranks[0]._values == ranks[1]._outcomes == {}


def test_values_for_an_exchange_that_cannot_have_begun_are_ignored(ranks):
    for number in (-1, 2, 10**9):
        ranks[0].receive_value(1, number, "an attacker's")
    assert ranks[0]._values == {}
    assert on_each_rank(ranks, decide(len)) == [SIZE] * SIZE


@pytest.mark.parametrize("missing", range(1, SIZE))
def test_the_first_missing_rank_is_named_on_all_ranks(ranks, missing):
    present = [member for member in ranks if member.world.rank not in (missing, SIZE - 1)]
    errors = on_each_rank(present, decide(len, 0.3))
    text = f"rank {missing} on a was still starting after 0.3 s; to wait longer, add --start_timeout 4"
    assert [str(error) for error in errors] == [text] * len(present)
    assert all(isinstance(error, AnotherRankFailed) for error in errors)


def test_a_missing_rank_zero_is_named(ranks, monkeypatch):
    monkeypatch.setattr(TIMERS, "late_answer", 0.1)
    with pytest.raises(AnotherRankFailed, match=r"rank 0 on a was still loading after 0\.2 s"):
        decide(len, 0.2, work="loading")(ranks[1])


def test_a_rank_that_has_ended_its_program_is_named_on_all_others_at_once(ranks):
    ranks[0].leave(2)
    errors = on_each_rank([ranks[rank] for rank in (0, 1, 3, 4)], decide(len, 3600))
    assert [str(error) for error in errors] == ["rank 2 on a has ended its program"] * 4
    ranks[3].leave(0)
    with pytest.raises(AnotherRankFailed, match="rank 0 on a has ended its program"):
        decide(len, 3600)(ranks[3])


def test_the_failure_of_another_rank_ends_the_wait(ranks):
    for member in ranks:
        member._check_failure = Mock(side_effect=AnotherRankFailed("rank 2 was lost"))
    assert [str(error) for error in on_each_rank([ranks[0], ranks[1]], decide(len, 3600))] == ["rank 2 was lost"] * 2


def test_rank_zero_prints_which_rank_is_late_and_rank_1_that_rank_zero_is(ranks, monkeypatch, capsys):
    """Not both: while rank zero waits for another rank, rank 1 prints nothing."""
    monkeypatch.setattr(TIMERS, "progress", 0.3)

    def late(member):
        time.sleep({0: 0.9, 4: 1.8}.get(member.world.rank, 0))
        return decide(len, 10, work="loading")(member)

    assert on_each_rank(ranks, late) == [SIZE] * SIZE
    lines = capsys.readouterr().err.splitlines()
    counts = [sum(text in line for line in lines) for text in ("rank 0 on a is loading", "rank 4 on a is loading")]
    assert min(counts) > 0 and sum(counts) == len(lines)


def test_a_refusal_of_rank_zero_is_raised_on_all_ranks(ranks):
    errors = on_each_rank(ranks, decide(Mock(side_effect=RequestError("a", "b", "c"))))
    assert [error.args for error in errors] == [("a", "b", "c")] * SIZE


@pytest.mark.parametrize("kind", [IndexError, TypeError])
def test_a_failed_decision_or_one_that_json_cannot_represent_is_an_error_on_all_ranks(ranks, kind):
    choose = Mock(side_effect=IndexError) if kind is IndexError else Mock(return_value=object())
    first, *others = on_each_rank(ranks, decide(choose))
    assert isinstance(first, kind) and len(others) == SIZE - 1
    text = f"rank 0 on a failed: {kind.__name__}"
    assert all(isinstance(error, AnotherRankFailed) and text in str(error) for error in others)
