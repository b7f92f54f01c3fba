"""The rendezvous under torchrun, whose agent provides a store that all processes share."""

from typing import Any

from rankzero.distributed.connections.key import Key
from rankzero.distributed.coordination.exchange import StoreExchange
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.rendezvous.errors import SAME_KEY_ADVICE, describe_key_problem
from rankzero.distributed.rendezvous.peers import (
    Members,
    Peer,
    assign_ranks,
    completed_by_rank_zero,
    node_views,
    read_view,
)
from rankzero.messages import AnotherRankFailed, RequestError


def find_ranks_through_store(
    exchange: StoreExchange, launch: Launch, this_peer: Peer, key: Key, seconds: float
) -> tuple[Launch, Members, str]:
    """Finds the other processes and compares the keys of all. All ranks must call.

    Returns:
        The completed launch, the processes that this process knows, and why the processes do not share a key; an empty
        text if they do.

    Raises:
        RequestError: The ranks do not share a key, and one of them has `RANKZERO_KEY`.
        AnotherRankFailed: A rank did not describe itself in time.
        ValueError: The description of a rank is malformed.
    """
    own: dict[str, Any] = {
        "peer": this_peer._replace(key_fingerprint=key.fingerprint(launch.world_id))._asdict(),
        "is_explicit": key.is_explicit,
    }
    assigned: list[Peer] = []

    def assign(ranks: list[Any]) -> list[Any]:
        peers = [peer for values in ranks if (peer := Peer.from_message(values["peer"]))]
        if len(peers) != len(ranks):
            raise ValueError("the description of a rank is malformed")
        assigned.extend(assign_ranks(peers))
        others = [peer for peer in peers if not peer.has_key_of(peers[0])]
        is_shared = bool(peers[0].key_fingerprint) and not others
        problem = "" if is_shared else describe_key_problem(key, peers[0], others)
        if problem and any(values["is_explicit"] for values in ranks):
            raise RequestError("the same RANKZERO_KEY on all ranks", problem, SAME_KEY_ADVICE)
        return [{**view, "key_problem": problem} for view in node_views(assigned)]

    view = exchange.decide(own, assign, seconds, node=launch.node_rank)
    if assigned:
        return *completed_by_rank_zero(launch, this_peer, assigned), str(view["key_problem"])
    result = read_view(launch, this_peer, view)
    if result is None:
        raise AnotherRankFailed("rank 0 has sent a malformed list of the processes of this node")
    return *result, str(view["key_problem"])
