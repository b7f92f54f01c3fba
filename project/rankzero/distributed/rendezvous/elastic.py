"""Where the processes of an elastic torchrun meet: at an address that rank zero leaves in torchrun's own rendezvous.

MASTER_ADDR and MASTER_PORT cannot be trusted there (torch 2.15.0, `DynamicRendezvousHandler.next_rendezvous`): each
agent keeps those of its first round, also where rank zero has moved since. And an agent that joins waits in vain for
them, as rank zero's agent writes them in its first round only; so its worker writes them for the rounds to come.
`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`, set for torchrun, avoids both.
"""

import socket
import time
from dataclasses import replace
from datetime import timedelta

from rankzero.distributed import network
from rankzero.distributed.environments.ancestors import option
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.environments.torchrun import own_command
from rankzero.messages import RequestError

ROUNDS = 200
"""So many joins and losses of machines are provided for."""

DEFAULT_PORT = 29400
"""torchrun's, where the endpoint names none."""

_KEY = "rankzero meets at"
_POLL_SECONDS = 0.1


def meeting_point(launch: Launch, start_timeout: float) -> Launch:
    """The launch, with where its processes meet; unchanged where torchrun's rendezvous cannot be reached.

    All ranks must call. Imports torch, whose TCPStore the rendezvous is.

    Raises:
        RequestError: Rank zero has not come.
    """
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    words = own_command()
    endpoint, run_id = option(words, "rdzv-endpoint") or "", option(words, "rdzv-id")
    host, _, port = endpoint.partition(":")
    if option(words, "rdzv-backend") != "c10d" or not run_id or not host:
        return launch
    store = TCPStore(
        host, int(port or DEFAULT_PORT), is_master=False, timeout=timedelta(seconds=30), wait_for_workers=False
    )
    ours = PrefixStore(f"rankzero.{run_id}", store)
    if launch.rank == 0:
        for coming_round in range(ROUNDS):
            coming = PrefixStore(f"torch.rendezvous.{run_id}.{coming_round}", store)
            coming.set("MASTER_ADDR", launch.address)
            coming.set("MASTER_PORT", str(launch.port))
        if launch.world_size == 1:
            return launch
        listening = network.listen("127.0.0.1" if launch.num_nodes == 1 else "", 0)
        address = "127.0.0.1" if launch.num_nodes == 1 else launch.address
        ours.set(_KEY, f"{address} {listening.getsockname()[1]}")
        return _met_at(launch, address, listening.getsockname()[1], listening.detach())
    deadline = time.monotonic() + start_timeout
    while time.monotonic() < deadline:
        if ours.check([_KEY]):
            address, _, found = ours.get(_KEY).decode().partition(" ")
            if _answers(address, int(found)):  # what an earlier rank zero left does not
                return _met_at(launch, address, int(found), None)
        time.sleep(_POLL_SECONDS)
    raise RequestError(
        f"to meet rank 0 within {start_timeout:g} s (--start_timeout)",
        f"it has left no address in torchrun's rendezvous at {endpoint}",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun ..., the same line on every machine",
    )


def _met_at(launch: Launch, address: str, port: int, listening: int | None) -> Launch:
    key = f"torchrun {launch.job_id} {port}"
    return replace(launch, address=address, port=port, listening=listening, world_id=key, uses_agent_store=False)


def _answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=2).close()
    except OSError:
        return False
    return True
