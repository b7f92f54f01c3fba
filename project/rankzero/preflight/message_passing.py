"""Sends a message from rank zero to every other rank, then around a ring."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from rankzero.distributed.coordinator import Coordinator
from rankzero.preflight.check import FAIL, OK, SKIPPED, Check, gather

VALUES = 1024
"""Number of values in a message."""


def check_message_passing(
    coordinator: Coordinator, device: torch.device, backend: str, notify: Callable[[str], None] = lambda line: None
) -> Check:
    """Sends data from rank zero to each other rank, one by one, and then from each rank to the next. All ranks must call.

    Args:
        coordinator: The processes; their process group must exist.
        device: Device of this process's messages.
        backend: The backend of the process group, `nccl` or `gloo`.
        notify: Called on rank zero with a line for each receipt.
    """
    name, size, rank = f"messages ({backend})", coordinator.launch.world_size, coordinator.launch.rank or 0
    if size == 1:
        return Check(name, SKIPPED, "there is only one process")
    hosts = [member.host for member in coordinator.members]

    def send_to_each() -> list[float]:
        seconds = []
        for receiver in range(1, size):
            if rank == 0:
                started = time.perf_counter()
                dist.send(_message(receiver, device), receiver)
                answer = torch.zeros(VALUES, device=device)
                dist.recv(answer, receiver)
                _check_equal(answer, _message(receiver + size, device))
                seconds.append(time.perf_counter() - started)
                notify(f"rank {receiver} on {hosts[receiver]} received data from rank 0")
            elif rank == receiver:
                received = torch.zeros(VALUES, device=device)
                dist.recv(received, 0)
                _check_equal(received, _message(receiver, device))
                dist.send(_message(receiver + size, device), 0)
        return seconds

    def send_around() -> bool:
        received = torch.zeros(VALUES, device=device)
        previous = (rank - 1) % size
        operations = [
            dist.P2POp(dist.isend, _message(rank, device), (rank + 1) % size),
            dist.P2POp(dist.irecv, received, previous),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        _check_equal(received, _message(previous, device))
        return True

    seconds, errors = gather(coordinator, send_to_each)
    if not errors:
        _, errors = gather(coordinator, send_around)
    round_trips = [round(value, 6) for value in seconds[0] or []]
    details = tuple(f"rank {rank} on {hosts[rank]}: {error}" for rank, error in errors.items())
    if errors:
        advice = ("check the network and the firewall between these hosts; --interface NAME selects a network",)
        return Check(name, FAIL, "a message did not arrive", details, advice, {"round_trips": round_trips})
    slowest = max(range(1, size), key=lambda rank: round_trips[rank - 1])
    summary = (
        f"rank 0 exchanged data with each other rank, and each rank with the next; the longest round trip, with rank "
        f"{slowest} on {hosts[slowest]}, took {1e3 * round_trips[slowest - 1]:.1f} ms"
    )
    return Check(name, OK, summary, (), (), {"round_trips": round_trips})


def _message(number: int, device: torch.device) -> torch.Tensor:
    return torch.arange(VALUES, dtype=torch.float32, device=device) + number


def _check_equal(received: torch.Tensor, expected: torch.Tensor) -> None:
    if not torch.equal(received, expected):
        raise ValueError("the received data differs from the sent data")
