"""Ranks are threads here; each has its own client of the same real store."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import TCPStore

from rankzero.distributed.coordination.exchange import StoreExchange
from rankzero.distributed.timers import TIMERS
from rankzero.messages import AnotherRankFailed, RequestError
from running import reserved_port

SIZE = 5


class CountingStore:
    """Passes all calls on to a store, and counts them."""

    def __init__(self, store):
        self.store, self.calls = store, []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append(name)
            return getattr(self.store, name)(*arguments)

        return call


@pytest.fixture
def ranks():
    with reserved_port() as port:
        pass
    options = {"timeout": timedelta(seconds=10), "wait_for_workers": False}
    stores = [TCPStore("127.0.0.1", port, is_master=rank == 0, **options) for rank in range(SIZE)]
    created = [
        StoreExchange(CountingStore(store), rank, SIZE, lambda rank: f"rank {rank}")
        for rank, store in enumerate(stores)
    ]
    yield created
    for rank in created:
        del rank.store.store  # a later test must not collect it in a forked process, which lacks the store's threads


def on_each_rank(ranks, work):
    def result_of(rank):
        try:
            return work(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(result_of, ranks))


def test_rank_zero_decides_on_the_values_of_all_ranks(ranks):
    assert on_each_rank(ranks, lambda rank: rank.decide(rank.rank * 2, sum, 10)) == [20] * SIZE
    assert (
        on_each_rank(ranks, lambda rank: rank.decide([rank.rank], lambda values: values, 10))
        == [[[rank] for rank in range(SIZE)]] * SIZE
    )


def test_an_exchange_takes_few_operations_however_late_a_rank_is(ranks):
    on_each_rank(ranks, lambda rank: rank.decide(None, len, 10))
    assert ranks[0].store.calls == ["set", "wait", "multi_get", "set", "wait", "get"]
    assert all(rank.store.calls == ["set", "wait", "get"] for rank in ranks[1:])


@pytest.mark.parametrize("missing", range(1, SIZE))
def test_the_first_missing_rank_is_named_on_all_ranks(ranks, missing):
    present = [rank for rank in ranks if rank.rank not in (missing, SIZE - 1)]
    errors = on_each_rank(present, lambda rank: rank.decide(None, len, 0.3))
    assert [str(error) for error in errors] == [f"rank {missing} did not respond within 0.3 s"] * len(present)
    assert all(isinstance(error, AnotherRankFailed) for error in errors)


def test_a_missing_rank_zero_is_named(ranks, monkeypatch):
    monkeypatch.setattr(TIMERS, "late_answer", 0.1)
    with pytest.raises(AnotherRankFailed, match=r"rank 0 did not respond within 0\.3 s"):
        ranks[1].decide(None, len, 0.2)


def test_a_refusal_of_rank_zero_is_raised_on_all_ranks(ranks):
    def refuse(values):
        raise RequestError("a", "b", "c")

    errors = on_each_rank(ranks, lambda rank: rank.decide(None, refuse, 10))
    assert [error.args for error in errors] == [("a", "b", "c")] * SIZE


def test_an_exception_in_the_decision_is_raised_on_all_ranks(ranks):
    first, *others = on_each_rank(ranks, lambda rank: rank.decide(None, lambda values: values[SIZE], 10))
    assert isinstance(first, IndexError)
    assert all(isinstance(error, AnotherRankFailed) and "rank 0 failed: IndexError" in str(error) for error in others)


def test_a_decision_that_json_cannot_represent_is_an_error_on_all_ranks(ranks):
    first, *others = on_each_rank(ranks, lambda rank: rank.decide(None, lambda values: object(), 10))
    assert isinstance(first, TypeError) and all(isinstance(error, AnotherRankFailed) for error in others)
