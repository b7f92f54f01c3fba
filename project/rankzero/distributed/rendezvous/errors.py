"""Errors of a rendezvous, with instructions that the user can follow. Does not import torch."""

import socket
from collections.abc import Sequence

from rankzero.distributed import network
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.rendezvous.peers import Peer
from rankzero.messages import RequestError

GREETING = "RANKZERO/1"
"""First word that rank zero sends on each new connection."""


def missing(launch: Launch, members: Sequence[Peer], timeout: float) -> RequestError:
    """Returns the error that names the ranks and machines that have not connected."""
    came = sorted({member.host for member in members})
    nodes = {member.node_rank for member in members}
    absent = [host for host in launch.hosts if host not in came] if len(set(launch.hosts)) > 1 else []
    if not absent and launch.num_nodes and None not in nodes:
        absent = [f"node {node}" for node in range(launch.num_nodes) if node not in nodes]
    elif launch.hosts and len(launch.hosts) == launch.num_nodes and None not in nodes:
        absent = [host for node, host in enumerate(launch.hosts) if node not in nodes]
    return RequestError(
        f"{launch.shape} within {timeout:g} s (--start_timeout)",
        f"{missing_ranks(launch, members)}"
        + (f"; nobody from {', '.join(absent)}" if absent else "")
        + f"; {len(members)} of {launch.world_size} came, from {', '.join(came)}",
        "the same line on every machine; is one down, or is the port "
        f"{launch.address}:{launch.port} closed to it? --start_timeout {max(int(timeout), 1) * 4} waits longer",
    )


def missing_ranks(launch: Launch, members: Sequence[Peer]) -> str:
    """Describes the ranks that have not connected."""
    if launch.rank is None:
        return f"missing {launch.world_size - len(members)} of {launch.world_size} tasks"
    ranks = sorted(set(range(launch.world_size)) - {member.rank for member in members})
    if len(members) == 1 and launch.rank != 0:
        return f"missing rank 0, which the others meet at {launch.address}:{launch.port}"
    shown = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"missing rank{'s' * (len(ranks) > 1)} {shown}"


def not_rank_zeros(launch: Launch, ips: Sequence[str]) -> RequestError:
    """Returns the error for an address that is not on rank zero's machine.

    Rank zero raises it, or a rank on the machine that has the address.
    """
    host, place = socket.gethostname(), f"{launch.address} ({', '.join(ips)})"
    found = f"rank 0 is on {host}, and {place} is another machine or none"
    if launch.rank != 0:
        found = f"{place} is {host}, and rank 0 is not on it: this is rank {launch.rank}"
    by_hand = f"--node_rank 0 on {launch.address}" if launch.launcher == "local" else ""
    return RequestError(
        f"to meet at {launch.address}:{launch.port}, rank 0's machine",
        found,
        "\nor ".join(filter(None, (by_hand, _how_to_say(launch, host if launch.rank == 0 else "HOST")))),
    )


def no_answer(launch: Launch, ips: Sequence[str]) -> RequestError:
    """Returns the error for an address that does not respond; on rank zero, for a port that is in use."""
    if launch.rank == 0:
        return RequestError(
            f"to listen on port {launch.port} of {socket.gethostname()}",
            f"it is in use by {network.holder(launch.port)}",
            "--master_port PORT (or MASTER_PORT=PORT), another one, the same for all",
        )
    return RequestError(
        f"to meet at {launch.address}:{launch.port} (MASTER_ADDR, --master_addr or the launcher's first host)",
        f"{launch.address} ({', '.join(ips)}) does not answer {socket.gethostname()}",
        "--master_addr HOST, where HOST is the name or IP address of rank 0's machine",
    )


def wrong_listener(launch: Launch, greeting: str) -> RequestError:
    """Returns the error for a port on which another run or an unrelated program listens.

    Args:
        launch: The position of this process among all processes.
        greeting: The first line that the listener sent; empty if it sent none.
    """
    if greeting.startswith(GREETING):
        who = f"another run's rank 0 ({greeting.removeprefix(GREETING).strip()})"
    else:
        who = "something that is no run about to start"
        if any(network.is_mine(ip) for ip in network.resolve(launch.address)):
            who = f"in use by {network.holder(launch.port)}"
    return RequestError(
        f"to meet at {launch.address}:{launch.port}",
        f"that port is {who}" if who.startswith("in use") else f"on that port is {who}",
        "--master_port PORT (or MASTER_PORT=PORT), another one, the same for all",
    )


def _how_to_say(launch: Launch, host: str) -> str:
    """Returns the flags that set rank zero's address under a launcher."""
    by_variable = {"mpi": f"mpirun -x MASTER_ADDR={host} ... (Open MPI), -genv MASTER_ADDR {host} (hydra),\nor "}
    return by_variable.get(launch.launcher, "") + f"--master_addr {host}"
