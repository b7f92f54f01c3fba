"""Errors of a rendezvous, with instructions that the user can follow."""

import socket
from collections.abc import Sequence

from rankzero.distributed.connections.handshake import GREETING
from rankzero.distributed.connections.key import NEW_KEY_COMMAND, Key
from rankzero.distributed.coordination import network
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.world import Peer
from rankzero.messages import RequestError, few

MAX_NAMED_RANKS, MAX_NAMED_HOSTS = 16, 8
"""How many ranks and hosts a message names; the others are counted."""

_SAME_VALUE = f"the same RANKZERO_KEY on all machines ({NEW_KEY_COMMAND} creates a value),\n"

SAME_KEY_ADVICE = _SAME_VALUE + "or start all ranks with the same home directory"
"""What to do if the ranks do not have the same key."""

UNAUTHENTICATED_ADVICE = (
    "to authenticate it, give all machines the same RANKZERO_KEY or home directory "
    "(--auth required refuses an unauthenticated run)"
)
"""What to do about a run that has started without a common key."""


def missing_processes_error(launch: Launch, members: Sequence[Peer], timeout: float) -> RequestError:
    """Returns the error that names the ranks and machines that have not connected."""
    connected_hosts = sorted({member.host for member in members})
    nodes = {member.node_rank for member in members}
    hosts = launch.hosts if len(set(launch.hosts)) > 1 else ()
    missing_machines = [host for host in hosts if host not in connected_hosts]
    if not missing_machines and launch.num_nodes and None not in nodes:
        missing_machines = [f"node {node}" for node in range(launch.num_nodes) if node not in nodes]
    elif launch.hosts and len(launch.hosts) == launch.num_nodes and None not in nodes:
        missing_machines = [host for node, host in enumerate(launch.hosts) if node not in nodes]
    return RequestError(
        f"{launch.shape} within {timeout:g} s (--start_timeout)",
        f"{describe_missing_ranks(launch, members)}"
        + (f"; no process from {few(missing_machines, MAX_NAMED_HOSTS)}" if missing_machines else "")
        + f"; {len(members)} of {launch.world_size} processes connected, from {few(connected_hosts, MAX_NAMED_HOSTS)}",
        "the same command on every machine; check that each is up and can connect to "
        f"{launch.address}:{launch.port}.\nTo wait longer, add --start_timeout {max(int(timeout), 1) * 4}",
    )


def describe_missing_ranks(launch: Launch, members: Sequence[Peer]) -> str:
    """Describes the ranks that have not connected."""
    if launch.rank is None:
        return f"missing {launch.world_size - len(members)} of {launch.world_size} tasks"
    missing_ranks = sorted(set(range(launch.world_size)) - {member.rank for member in members})
    if len(members) == 1 and launch.rank != 0:
        return f"missing rank 0, which must listen on {launch.address}:{launch.port}"
    return f"missing rank{'s' * (len(missing_ranks) > 1)} {few(list(map(str, missing_ranks)), MAX_NAMED_RANKS)}"


def wrong_address_error(launch: Launch, ips: Sequence[str]) -> RequestError:
    """Returns the error for an address that is not on rank zero's machine.

    Rank zero raises it, or a rank on the machine that has the address.
    """
    host, address = socket.gethostname(), f"{launch.address} ({', '.join(ips)})"
    found = f"rank 0 is on {host}, but {address} is another machine or does not exist"
    if launch.rank != 0:
        found = f"{address} is {host}, but rank 0 is elsewhere: this is rank {launch.rank}"
        host = "HOST"
    instead = {
        "local": f"--node_rank 0 on {launch.address}\nor ",
        "mpi": f"mpirun -x MASTER_ADDR={host} ... (Open MPI), -genv MASTER_ADDR {host} (hydra),\nor ",
    }.get(launch.launcher, "")
    asked = f"rendezvous at {launch.address}:{launch.port}, the machine of rank 0"
    return RequestError(asked, found, f"{instead}--master_addr {host}")


def no_answer_error(launch: Launch, ips: Sequence[str]) -> RequestError:
    """Returns the error for an address that does not respond; on rank zero, for a port that is in use."""
    if launch.rank == 0:
        return RequestError(
            f"port {launch.port} of {socket.gethostname()} for the rendezvous",
            f"it is in use by {network.describe_listener(launch.port)}",
            "another --master_port PORT (or MASTER_PORT=PORT), the same on every machine",
        )
    return RequestError(
        f"rendezvous at {launch.address}:{launch.port} (MASTER_ADDR, --master_addr or the launcher's first host)",
        f"{launch.address} ({', '.join(ips)}) does not answer {socket.gethostname()}",
        "--master_addr HOST, where HOST is the name or IP address of rank 0's machine",
    )


def wrong_listener_error(launch: Launch, greeting: str) -> RequestError:
    """Returns the error for a port on which another run or an unrelated program listens."""
    found = "on that port is a program other than a starting run"
    if greeting.startswith(GREETING):
        found = f"on that port is another run's rank 0 ({greeting.removeprefix(GREETING).strip()})"
    elif any(network.is_local_address(ip) for ip in network.resolve(launch.address)):
        found = f"that port is in use by {network.describe_listener(launch.port)}"
    return RequestError(
        f"rendezvous at {launch.address}:{launch.port}",
        found,
        "another --master_port PORT (or MASTER_PORT=PORT), the same on every machine",
    )


def world_size_error(launch: Launch, this_peer: Peer, peer: Peer) -> RequestError:
    """Returns the error for a process that expects another number of processes than rank zero."""
    return RequestError(
        f"a world of {launch.world_size} (rank 0 on {this_peer.host})",
        f"rank {peer.rank} on {peer.host} expects {peer.world_size}",
        "the same command, with the same --nodes and --devices or WORLD_SIZE, on every machine",
    )


def duplicate_rank_error(existing: Peer, peer: Peer) -> RequestError:
    """Returns the error for two processes with the same rank."""
    return RequestError(
        f"one process with rank {peer.rank}",
        f"two: process {existing.pid} on {existing.host} and process {peer.pid} on {peer.host}",
        "a different --node_rank on each machine (or a different RANK for each process)",
    )


def different_keys_error(launch: Launch, key: Key) -> RequestError:
    """Returns the error for a process that does not have the key of rank zero, if one of the two requires it."""
    other = "another rank" if launch.rank == 0 else "rank 0"
    found = f"{other} does not have the key of rank {launch.rank} on {socket.gethostname()} ({key.origin})"
    return RequestError(_key_request(launch), found, SAME_KEY_ADVICE)


def another_key_error(launch: Launch, key: Key, first: Peer, others: Sequence[Peer]) -> RequestError:
    """Returns the error for processes of this user that do not share a key, see `describe_key_problem`."""
    return RequestError(_key_request(launch), describe_key_problem(key, first, others), SAME_KEY_ADVICE)


def _key_request(launch: Launch) -> str:
    return f"rendezvous at {launch.address}:{launch.port} with the key of this run"


def missing_key_error(key: Key) -> RequestError:
    """Returns the error for a process without a key, if `--auth required` is set."""
    advice = _SAME_VALUE + "or remove the cause named above, so that the key file can be used"
    return RequestError("--auth required", f"no key on {socket.gethostname()}: {key.origin}", advice)


def describe_key_problem(key: Key, first: Peer, others: Sequence[Peer]) -> str:
    """Describes why the processes of a run do not share a key."""
    if key.secret is None:
        return f"rank 0 on {first.host} has no key ({key.origin})"
    names = few([peer.host if peer.rank is None else f"rank {peer.rank} on {peer.host}" for peer in others])
    return f"rank 0 on {first.host} has another key ({key.origin}) than {names}"
