"""Lists the processes that the rendezvous has found."""

from rankzero.distributed.coordinator import Coordinator
from rankzero.distributed.devices import WorldInfo
from rankzero.preflight.check import OK, Check

MAX_LISTED = 64


def check_processes(coordinator: Coordinator, world: WorldInfo, seconds: float) -> Check:
    """Lists host, rank, local rank, device and process id of every process. All ranks must call.

    A missing process has ended the rendezvous before, with a message that names it.

    Args:
        coordinator: The processes.
        world: The devices of all processes.
        seconds: Seconds from the start of this process to the end of the rendezvous.
    """
    device = f"{world.accelerator}:{world.index}" if world.accelerator == "cuda" else world.accelerator
    devices = coordinator.all_gather_object(device)
    rows = [
        {"rank": member.rank, "host": member.host, "local_rank": member.local_rank, "device": device, "pid": member.pid}
        for member, device in zip(coordinator.members, devices, strict=True)
    ]
    lines = [
        f"rank {row['rank']} on {row['host']}, local rank {row['local_rank']}, {row['device']}, process {row['pid']}"
        for row in rows[:MAX_LISTED]
    ]
    if len(rows) > MAX_LISTED:
        lines.append(f"and {len(rows) - MAX_LISTED} more")
    count, hosts = len(rows), len({member.host for member in coordinator.members})
    summary = f"all {count} processes on {hosts} host{'s' * (hosts > 1)} have connected, after {seconds:.1f} s"
    if count == 1:
        summary = f"one process on {rows[0]['host']}"
    return Check("rendezvous", OK, summary, tuple(lines), values={"ranks": rows, "seconds": round(seconds, 3)})
