"""Ranks are threads here; each has its own client of the same real store."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import TCPStore

from rankzero.distributed.connections.key import Key
from rankzero.distributed.coordination.exchange import StoreExchange
from rankzero.distributed.coordination.find_ranks import find_ranks_through_store
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.rendezvous.peers import Peer
from rankzero.messages import AnotherRankFailed, RequestError
from running import reserved_port

FILE_KEY = Key(b"k" * 32, "the file")
EXPLICIT = Key(b"e" * 32, "RANKZERO_KEY", is_explicit=True)


@pytest.fixture
def find():
    """Returns a function that lets three ranks on two nodes find one another, and returns their results or errors."""
    with reserved_port() as port:
        pass
    options = {"timeout": timedelta(seconds=10), "wait_for_workers": False}
    stores = [TCPStore("127.0.0.1", port, is_master=rank == 0, **options) for rank in range(3)]

    def find(*keys, malformed=()):
        def result_of(rank):
            node = int(rank == 2)
            launch = Launch(
                launcher="torchrun", rank=rank, local_rank=rank % 2, world_size=3, node_rank=node, world_id="w"
            )
            peer = Peer(rank, rank % 2, node, 3, "ab"[node], "x" if rank in malformed else 100 + rank, id=f"{rank}")
            exchange = StoreExchange(stores[rank], rank, 3, "rank {}".format)
            try:
                return find_ranks_through_store(exchange, launch, peer, keys[rank], 10)
            except Exception as error:
                return error

        with ThreadPoolExecutor(3) as pool:
            return list(pool.map(result_of, range(3)))

    yield find
    stores.clear()  # a later test must not collect them in a forked process, which lacks their threads


def test_each_rank_knows_its_node_and_rank_zero(find):
    results = find(FILE_KEY, FILE_KEY, FILE_KEY)
    assert [problem for _, _, problem in results] == [""] * 3
    assert [len(members) for _, members, _ in results] == [3, 2, 2]
    assert [launch.processes_per_node for launch, _, _ in results] == [(2, 1)] * 3


def test_ranks_without_a_common_key_are_named(find):
    results = find(FILE_KEY, FILE_KEY, Key(b"o" * 32, "elsewhere"))
    assert {problem for *_, problem in results} == {"rank 0 on a has another key (the file) than rank 2 on b"}


@pytest.mark.parametrize("keys", [(EXPLICIT, EXPLICIT, FILE_KEY), (FILE_KEY, EXPLICIT, FILE_KEY)])
def test_a_run_with_an_explicit_key_refuses_ranks_without_it(find, keys):
    results = find(*keys)
    assert all(isinstance(error, RequestError) and "RANKZERO_KEY" in error.asked for error in results), results


def test_a_malformed_description_is_an_error_on_all_ranks(find):
    first, *others = find(FILE_KEY, FILE_KEY, FILE_KEY, malformed=(1,))
    assert isinstance(first, ValueError) and all(isinstance(error, AnotherRankFailed) for error in others)
