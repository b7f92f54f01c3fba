"""Sends a message from rank zero to every other rank, then around a ring."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from rankzero.distributed.coordination.coordinator import Coordinator
from rankzero.distributed.timers import TIMERS
from rankzero.preflight.check import FAIL, NETWORK_ADVICE, OK, Check, error_lines, gather

VALUES = 1024
"""Number of values in a message."""

CHANGED = "the received data differs from the sent data"


def check_message_passing(
    coordinator: Coordinator,
    backend: str,
    group: dist.ProcessGroup,
    device: torch.device,
    notify: Callable[[str], None],
) -> Check:
    """Sends data from rank zero to each other rank, one by one, then from each rank to the next. All ranks must call.

    Args:
        coordinator: Exchanges results between all ranks.
        backend: `nccl` or `gloo`.
        group: A process group of all ranks with this backend.
        device: Device of this process's messages.
        notify: Called on rank zero with a line for each receipt.
    """
    name, size, rank = f"{backend} messages", coordinator.launch.world_size, coordinator.launch.rank or 0
    hosts = coordinator.hosts

    def send_to_each() -> list[float]:
        seconds, is_intact = [], True
        for receiver in range(1, size):
            if rank == 0:
                started = time.perf_counter()
                dist.send(_message(receiver, device), receiver, group=group)
                answer = torch.zeros(VALUES, device=device)
                dist.recv(answer, receiver, group=group)
                is_intact &= torch.equal(answer, _message(receiver + size, device))
                seconds.append(time.perf_counter() - started)
                notify(f"rank {receiver} on {hosts[receiver]} received data from rank 0")
            elif rank == receiver:
                received = torch.zeros(VALUES, device=device)
                dist.recv(received, 0, group=group)
                is_intact = torch.equal(received, _message(receiver, device))
                dist.send(_message(receiver + size, device), 0, group=group)
        if not is_intact:  # raised last, because the other ranks wait for this one
            raise ValueError(CHANGED)
        return seconds

    def send_around() -> bool:
        received = torch.zeros(VALUES, device=device)
        previous = (rank - 1) % size
        operations = [
            dist.P2POp(dist.isend, _message(rank, device), (rank + 1) % size, group),
            dist.P2POp(dist.irecv, received, previous, group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        if not torch.equal(received, _message(previous, device)):
            raise ValueError(CHANGED)
        return True

    seconds, errors = gather(coordinator, send_to_each, TIMERS.network_check)
    if not errors:
        _, errors = gather(coordinator, send_around, TIMERS.network_check)
    round_trips = [round(value, 6) for value in seconds[0] or []]
    if errors:
        values = {"round_trips": round_trips, "errors": errors}
        summary = "a message did not arrive, or its data changed"
        return Check(name, FAIL, summary, error_lines(errors, hosts), [NETWORK_ADVICE], values, blocks=True)
    slowest = max(range(1, size), key=lambda rank: round_trips[rank - 1])
    summary = (
        f"rank 0 exchanged data with each other rank, and each rank with the next; the longest round trip, with rank "
        f"{slowest} on {hosts[slowest]}, took {1e3 * round_trips[slowest - 1]:.1f} ms"
    )
    return Check(name, OK, summary, (), (), {"round_trips": round_trips})


def _message(number: int, device: torch.device) -> torch.Tensor:
    return torch.arange(VALUES, dtype=torch.float32, device=device) + number
