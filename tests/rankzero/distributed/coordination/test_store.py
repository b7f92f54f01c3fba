import contextlib
import socket
import threading
from datetime import timedelta
from unittest.mock import Mock

import pytest

from rankzero.distributed.connections.key import Key
from rankzero.distributed.coordination.store import (
    StoreExchange,
    connect_to_store,
    find_ranks_through_store,
    serve_store,
)
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.timers import TIMERS
from rankzero.distributed.world import Peer, World
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


FILE_KEY = Key(b"k" * 32, "the file")
EXPLICIT = Key(b"e" * 32, "RANKZERO_KEY", is_explicit=True)


def find(*keys, malformed=()):
    """Lets three ranks on two nodes find one another, and returns their results or errors."""
    stores = store_clients(3)

    def find_from(rank):
        node = int(rank == 2)
        launch = Launch(launcher="torchrun", rank=rank, local_rank=rank % 2, world_size=3, node_rank=node, world_id="w")
        peer = Peer(rank, rank % 2, node, 3, "ab"[node], "x" if rank in malformed else 100 + rank, id=f"{rank}")
        exchange = StoreExchange(stores[rank], rank, 3, "rank {}".format)
        return find_ranks_through_store(exchange, World(launch, {rank: peer}), keys[rank], 10)

    results = on_each_rank(range(3), find_from)
    stores.clear()
    return results


def test_each_rank_knows_its_node_and_rank_zero():
    results = find(FILE_KEY, FILE_KEY, FILE_KEY)
    assert [world.key_problem for world in results] == [""] * 3
    assert [len(world.peers) for world in results] == [3, 2, 2]
    assert [world.launch.processes_per_node for world in results] == [(2, 1)] * 3


def test_ranks_without_a_common_key_are_named_and_refused_if_a_key_is_explicit():
    results = find(FILE_KEY, FILE_KEY, Key(b"o" * 32, "elsewhere"))
    assert {world.key_problem for world in results} == {"rank 0 on a has another key (the file) than rank 2 on b"}
    for keys in ((EXPLICIT, EXPLICIT, FILE_KEY), (FILE_KEY, EXPLICIT, FILE_KEY)):
        results = find(*keys)
        assert all(isinstance(error, RequestError) and "RANKZERO_KEY" in error.asked for error in results), results


def test_a_malformed_description_is_an_error_on_all_ranks():
    first, *others = find(FILE_KEY, FILE_KEY, FILE_KEY, malformed=(1,))
    assert isinstance(first, ValueError) and all(isinstance(error, AnotherRankFailed) for error in others)
