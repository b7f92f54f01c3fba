from rankzero.distributed.connections.key import Key
from rankzero.distributed.coordination.exchange import StoreExchange
from rankzero.distributed.coordination.find_ranks import find_ranks_through_store
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.rendezvous.peers import Peer
from rankzero.messages import AnotherRankFailed, RequestError
from running import on_each_rank, store_clients

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
        return find_ranks_through_store(exchange, launch, peer, keys[rank], 10)

    results = on_each_rank(range(3), find_from)
    stores.clear()
    return results


def test_each_rank_knows_its_node_and_rank_zero():
    results = find(FILE_KEY, FILE_KEY, FILE_KEY)
    assert [problem for _, _, problem in results] == [""] * 3
    assert [len(members) for _, members, _ in results] == [3, 2, 2]
    assert [launch.processes_per_node for launch, _, _ in results] == [(2, 1)] * 3


def test_ranks_without_a_common_key_are_named_and_refused_if_a_key_is_explicit():
    results = find(FILE_KEY, FILE_KEY, Key(b"o" * 32, "elsewhere"))
    assert {problem for *_, problem in results} == {"rank 0 on a has another key (the file) than rank 2 on b"}
    for keys in ((EXPLICIT, EXPLICIT, FILE_KEY), (FILE_KEY, EXPLICIT, FILE_KEY)):
        results = find(*keys)
        assert all(isinstance(error, RequestError) and "RANKZERO_KEY" in error.asked for error in results), results


def test_a_malformed_description_is_an_error_on_all_ranks():
    first, *others = find(FILE_KEY, FILE_KEY, FILE_KEY, malformed=(1,))
    assert isinstance(first, ValueError) and all(isinstance(error, AnotherRankFailed) for error in others)
