"""Checks that the launcher started the processes that were requested. Imports no torch."""

import os
from collections.abc import Mapping
from typing import Any

from rankzero.distributed.environments.launch import Launch, RequestedWorld
from rankzero.distributed.environments.launchers import LAUNCHERS
from rankzero.messages import RequestError

PROCESSES_A_CORE = 16
"""A request for more processes than this on one machine is refused as a typo."""


def requested_devices(value: object) -> tuple[int | None, tuple[int, ...] | None]:
    """Reads `devices` in any of the forms that Lightning's Trainer takes.

    Args:
        value: A number, a list of GPU indices, either as text, `auto`, `-1` or None.

    Returns:
        Processes on each machine, and the indices of their GPUs; None for what is left open.
    """
    if isinstance(value, str):
        try:
            numbers = [int(item) for item in value.strip("[] ").split(",") if item.strip()]
        except ValueError:  # `auto`
            return None, None
        value = numbers if set("[,") & set(value) or not numbers else numbers[0]
    if isinstance(value, list | tuple):
        return (len(value), tuple(value)) if value else (None, None)
    return (value if isinstance(value, int) and value > 0 else None), None


def requested_world(own: Mapping[str, Any], lightning: Mapping[str, Any]) -> RequestedWorld:
    """The processes that a Trainer asks for.

    Args:
        own: Our own arguments, by name; all of them.
        lightning: Lightning's, as far as they were given.
    """
    devices, gpus = requested_devices(lightning.get("devices"))
    accelerator = lightning.get("accelerator") or "auto"
    return RequestedWorld(
        nodes=lightning.get("num_nodes"),
        devices=devices,
        gpus=gpus,
        accelerator=accelerator if isinstance(accelerator, str) else accelerator.name(),
        launcher=own["launcher"],
        node_rank=own["node_rank"],
        address=own["master_addr"],
        port=own["master_port"],
        interface=own["interface"],
        backend=own["backend"],
        start_timeout=float(own["start_timeout"]),
    )


def check_world(requested: RequestedWorld, launch: Launch) -> None:
    """Compares the requested nodes and devices with the launcher's world, as far as that is known.

    Raises:
        RequestError: They differ, and the launcher cannot change its world later.
    """
    if not launch.externally_created or launch.elastic:
        return
    each = launch.processes_a_node
    wrong_nodes = requested.nodes is not None and launch.num_nodes not in (None, requested.nodes)
    wrong_devices = requested.devices is not None and (
        any(count != requested.devices for count in each) if each else launch.world_size % requested.devices != 0
    )
    wrong_product = None not in (requested.nodes, requested.devices) and _product(requested) != launch.world_size
    if (
        not each
        and launch.num_nodes
        and requested.devices
        and launch.world_size != launch.num_nodes * requested.devices
    ):
        wrong_devices = True
    if not (wrong_nodes or wrong_devices or wrong_product):
        return
    words = [
        f"--{name} {value}" for name, value in (("nodes", requested.nodes), ("devices", requested.devices)) if value
    ]
    raise RequestError(
        " ".join(words),
        f"{launch.launcher} started {launch.shape} ({launch.evidence})",
        _instead(requested, launch),
    )


def processes_to_start(requested: RequestedWorld, launch: Launch) -> int:
    """How many processes this one has to start itself: the requested number, unless a launcher has started them.

    Returns:
        0 where this process does the work itself, or where the number is left open.
    """
    if launch.externally_created:
        return 0
    count, most = requested.devices or 0, PROCESSES_A_CORE * (os.cpu_count() or 1)
    if count > most:
        raise RequestError(
            f"--devices {count}", f"{os.cpu_count()} cores on this machine", f"--devices {most}, or less"
        )
    return 0 if count == 1 else count


def _product(requested: RequestedWorld) -> int:
    return (requested.nodes or 1) * (requested.devices or 1)


def _instead(requested: RequestedWorld, launch: Launch) -> str:
    """The flags that fit the launcher, or the launcher's line that fits the flags."""
    each = launch.processes_a_node or ((launch.world_size // launch.num_nodes,) if launch.num_nodes else ())
    fitting = ""
    if launch.num_nodes and len(set(each)) == 1:
        fitting = f"--nodes {launch.num_nodes} --devices {each[0]}, or leave both out"
    nodes, devices = requested.nodes or launch.num_nodes or 1, requested.devices or (each[0] if each else 1)
    start = LAUNCHERS[launch.launcher].line_for(nodes, devices)
    if launch.launcher == "slurm" and launch.world_size == 1:
        start = f"{start}\nor, to start processes in this task, --launcher local"
    return "\nor ".join(filter(None, (fitting or "leave --nodes and --devices out", start)))
