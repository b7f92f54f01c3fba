"""The rendezvous: every process connects to rank zero, which answers once all have. Does not import torch.

The rendezvous precedes torch's own (a TCPStore on the same socket), which waits silently and cannot report which ranks
are missing. On each machine, one process connects to rank zero and describes all processes of the machine. Rank zero
answers with their positions, or with the reason why the run cannot start.
"""

import time

from rankzero.distributed.connections.key import find_key
from rankzero.distributed.coordination import network
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.rendezvous.errors import missing_key_error
from rankzero.distributed.rendezvous.leader import listen_as_leader
from rankzero.distributed.rendezvous.listening import listen_for_ranks
from rankzero.distributed.rendezvous.ranks import world_of_rank_zero
from rankzero.distributed.rendezvous.search import RankZeroSearch
from rankzero.distributed.rendezvous.server import RendezvousServer
from rankzero.distributed.world import Peer, World
from rankzero.messages import RequestError


def rendezvous(launch: Launch, start_timeout: float, interface: str | None = None, requires_key: bool = False) -> World:
    """Waits until all processes of the world have connected. All ranks must call.

    Args:
        launch: The position of this process among all processes. Not from torchrun, which has already connected them.
        start_timeout: Seconds to wait for all processes.
        interface: `--interface`; if given, rank zero listens only on the address of this interface.
        requires_key: Whether all processes have to know the same key (`--auth required`).

    Raises:
        RequestError: A process is missing, connected twice or belongs to another world, or rank zero is unreachable.
    """
    deadline = time.monotonic() + start_timeout
    try:
        key = find_key()
        this_peer = Peer.this(launch, key)
        if requires_key and key.secret is None:
            raise missing_key_error(key)
        if interface:
            network.address_of(interface)
        listener = None
        may_listen = launch.rank == 0 or (launch.rank is None and launch.node_rank == 0)
        if may_listen:
            listener = listen_for_ranks(launch, interface, key)
        if listener is None:
            # If this process has found the port in use, rank zero is on this machine, where it has the same key.
            requires_key = requires_key or key.is_explicit or (may_listen and key.secret is not None)
            return RankZeroSearch(launch, this_peer, deadline, start_timeout, key, requires_key).result()
    except RequestError as error:
        error.local_only = error.reported_elsewhere is None
        raise
    local_listener = listen_as_leader(launch)
    listeners = [listener, *([local_listener] if local_listener else [])]
    server = RendezvousServer(launch, this_peer, listeners, deadline, start_timeout, key, requires_key)
    assigned = server.wait()
    if local_listener:
        local_listener.close()
    world = world_of_rank_zero(launch, this_peer, assigned)
    world.address, world.listener = network.reachable_address(listener), listener
    world.key_problem = server.key_problem
    return world
