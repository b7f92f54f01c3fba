import contextlib
import socket
import threading
from datetime import timedelta
from unittest.mock import Mock

import pytest

from rankzero.distributed.coordination.exchange import StoreExchange, connect_to_store, serve_store
from rankzero.distributed.timers import TIMERS
from rankzero.messages import AnotherRankFailed, RequestError
from running import on_each_rank, reserved_port, store_clients


def test_a_server_that_ended_is_reported(scale_timers):
    scale_timers(0.03)
    with reserved_port() as port:
        pass
    with pytest.raises(AnotherRankFailed, match=r"rank 0 on a has ended: nothing listens at 127\.0\.0\.1:"):
        connect_to_store("127.0.0.1", port, 300, "rank 0 on a")


def test_a_client_waits_for_a_server_that_still_imports_torch(scale_timers):
    scale_timers(0.03)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port, serving = listener.getsockname()[1], []
        duplicate = listener.dup()
        timer = threading.Timer(0.7, lambda: serving.append(serve_store("127.0.0.1", duplicate, 30)))
        timer.start()
        client = connect_to_store("127.0.0.1", port, 30, "rank 0")
        timer.join()
        client.set("key", "value")
        assert serving[0].get("key") == b"value"
        serving[0].set("other", "text")
        assert client.get("other") == b"text" and client.timeout == timedelta(seconds=30)
        del client
        serving.clear()


def test_a_server_whose_queue_of_connections_is_full_has_not_ended_and_the_wait_for_it_is_limited(scale_timers):
    scale_timers(0.03)
    with socket.socket() as listener, contextlib.ExitStack() as waiting:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            client = waiting.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        with pytest.raises(AnotherRankFailed, match="rank 0 on a did not answer at .* within 1 s"):
            connect_to_store(*listener.getsockname(), 1, "rank 0 on a")


SIZE = 5
LONGER = "to wait longer, add --start_timeout 4"


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
    created = [
        StoreExchange(CountingStore(store), rank, SIZE, "rank {}".format)
        for rank, store in enumerate(store_clients(SIZE))
    ]
    yield created
    for rank in created:
        del rank.store.store


def test_rank_zero_decides_on_the_values_of_all_ranks_in_few_operations(ranks):
    decided = on_each_rank(ranks, lambda rank: rank.decide([rank.rank], lambda values: values, 10))
    assert decided == [[[rank] for rank in range(SIZE)]] * SIZE
    assert ranks[0].store.calls == ["set", "wait", "multi_get", "set", "wait", "get"]
    assert all(rank.store.calls == ["set", "wait", "get"] for rank in ranks[1:])
    assert on_each_rank(ranks, lambda rank: rank.decide(rank.rank * 2, sum, 10)) == [20] * SIZE


@pytest.mark.parametrize("missing", range(1, SIZE))
def test_the_first_missing_rank_is_named_on_all_ranks(ranks, missing):
    present = [rank for rank in ranks if rank.rank not in (missing, SIZE - 1)]
    errors = on_each_rank(present, lambda rank: rank.decide(None, len, 0.3))
    assert [str(error) for error in errors] == [f"rank {missing} was still starting after 0.3 s; {LONGER}"] * len(
        present
    )
    assert all(isinstance(error, AnotherRankFailed) for error in errors)


def test_a_missing_rank_zero_is_named(ranks, monkeypatch):
    monkeypatch.setattr(TIMERS, "late_answer", 0.1)
    with pytest.raises(AnotherRankFailed, match=r"rank 0 was still loading after 0\.3 s"):
        ranks[1].decide(None, len, 0.2, work="loading")


def test_a_rank_that_has_ended_its_program_is_named_on_all_others_at_once(ranks, monkeypatch):
    monkeypatch.setattr(TIMERS, "slow_poll", 0.1)
    ranks[0].left_ranks = lambda: {2}
    errors = on_each_rank([ranks[rank] for rank in (0, 1, 3, 4)], lambda rank: rank.decide(None, len, 3600))
    assert [str(error) for error in errors] == ["rank 2 has ended its program"] * 4


def test_a_refusal_of_rank_zero_is_raised_on_all_ranks(ranks):
    refuse = Mock(side_effect=RequestError("a", "b", "c"))
    errors = on_each_rank(ranks, lambda rank: rank.decide(None, refuse, 10))
    assert [error.args for error in errors] == [("a", "b", "c")] * SIZE


@pytest.mark.parametrize("kind", [IndexError, TypeError])
def test_a_failed_decision_or_one_that_json_cannot_represent_is_an_error_on_all_ranks(ranks, kind):
    choose = Mock(side_effect=IndexError) if kind is IndexError else Mock(return_value=object())
    first, *others = on_each_rank(ranks, lambda rank: rank.decide(None, choose, 10))
    assert isinstance(first, kind) and len(others) == SIZE - 1
    text = f"rank 0 failed: {kind.__name__}"
    assert all(isinstance(error, AnotherRankFailed) and text in str(error) for error in others)
