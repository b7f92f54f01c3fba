"""Checks that the launcher started the processes that were requested."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from rankzero.distributed.environments.launch import Launch, RequestedWorld
from rankzero.distributed.environments.launchers import LAUNCHERS
from rankzero.messages import RequestError, WrongArgumentError

PROCESSES_PER_CORE = 16
"""Processes per core. A request for more on one machine is refused as a typo."""


def requested_devices(value: object) -> tuple[int | None, tuple[int, ...] | None]:
    """Parses `devices` in any form that Lightning's Trainer accepts.

    Args:
        value: A number, a list of GPU indices, either of these as text, `auto`, `-1` or None.

    Returns:
        Number of processes per machine and indices of their GPUs (empty for all GPUs), each None if not specified.

    Raises:
        RequestError: No device is requested.
    """
    if isinstance(value, str):
        try:
            numbers = [int(item) for item in value.strip("[] ").split(",") if item.strip()]
        except ValueError:
            if value == "auto":
                return None, None
            raise _wrong_devices_error(value) from None
        value = numbers if set("[,") & set(value) or not numbers else numbers[0]
    if value is None or value == -1:
        return None, None if value is None else ()
    gpus = tuple(value) if isinstance(value, Sequence) else None
    count = value if gpus is None else len(gpus)
    if not isinstance(count, int) or count < 1:
        raise _wrong_devices_error(value)
    return count, gpus


def _wrong_devices_error(value: object) -> WrongArgumentError:
    found = "it is neither a number of devices from 1, nor a list of GPU indices, nor -1 or auto"
    return WrongArgumentError(f"devices={value!r}", found, "devices=N, or omit it")


def requested_world(arguments: Mapping[str, Any], lightning_arguments: Mapping[str, Any]) -> RequestedWorld:
    """Returns the processes that a Trainer's arguments request."""
    devices, gpus = requested_devices(lightning_arguments.get("devices"))
    accelerator = lightning_arguments.get("accelerator") or "auto"
    same_names = ("launcher", "node_rank", "interface", "backend", "start_timeout", "auth")
    return RequestedWorld(
        nodes=lightning_arguments.get("num_nodes"),
        devices=devices,
        gpus=gpus,
        accelerator=accelerator.name() if hasattr(accelerator, "name") else str(accelerator),
        address=arguments["master_addr"],
        port=arguments["master_port"],
        **{name: arguments[name] for name in same_names},
    )


def check_world(requested: RequestedWorld, launch: Launch) -> None:
    """Compares the requested nodes and devices with the processes that the launcher started, as far as known.

    An elastic torchrun is not checked, because its number of machines may change.

    Raises:
        RequestError: The numbers differ.
    """
    if not launch.externally_created or launch.elastic:
        return
    nodes, devices, counts = requested.nodes, requested.devices, launch.processes_per_node
    has_wrong_nodes = nodes is not None and (launch.num_nodes not in (None, nodes) or nodes > launch.world_size)
    has_wrong_devices = devices and any(count != devices for count in counts or ())
    if devices and not counts:
        has_wrong_devices = launch.world_size != (launch.num_nodes or launch.world_size // devices) * devices
    has_wrong_product = nodes and devices and nodes * devices != launch.world_size
    if not (has_wrong_nodes or has_wrong_devices or has_wrong_product):
        return
    flags = " ".join(f"--{name} {value}" for name, value in (("nodes", nodes), ("devices", devices)) if value)
    found = f"{launch.launcher} started {launch.shape} ({launch.evidence})"
    raise RequestError(flags, found, _suggestion(requested, launch))


def processes_to_start(requested: RequestedWorld, launch: Launch) -> int:
    """Returns the number of local processes to start.

    Returns:
        0 if a launcher has started all processes, if one process suffices (this one), or if no number is specified.

    Raises:
        RequestError: More than `PROCESSES_PER_CORE` processes per core are requested.
    """
    if launch.externally_created:
        return 0
    count, maximum = requested.devices or launch.local_world_size or 0, PROCESSES_PER_CORE * (os.cpu_count() or 1)
    if count > maximum:
        found = f"{os.cpu_count()} cores on this machine, which run at most {maximum} processes"
        raise RequestError(f"--devices {count}", found, f"--devices {os.cpu_count()}")
    return 0 if count == 1 else count


def _suggestion(requested: RequestedWorld, launch: Launch) -> str:
    """Returns the flags that fit the launcher and the launcher's command that fits the flags."""
    process_counts = launch.processes_per_node or ((launch.world_size // launch.num_nodes,) if launch.num_nodes else ())
    fitting_flags = ""
    if launch.num_nodes and len(set(process_counts)) == 1:
        fitting_flags = f"--nodes {launch.num_nodes} --devices {process_counts[0]}, or omit both"
    nodes = requested.nodes or launch.num_nodes or 1
    devices = requested.devices or (process_counts[0] if process_counts else 1)
    scheduler = "pbs" if launch.launcher == "mpi" and "PBS_NODEFILE" in os.environ else launch.launcher
    command = LAUNCHERS[scheduler].command_for(nodes, devices)
    if launch.launcher == "pbs":
        command = f"qsub -l select={nodes}:ncpus={devices}:mpiprocs={devices} -l place=scatter ..., for other tasks"
    if launch.launcher == "slurm" and launch.world_size == 1:
        command = f"{command}\nor, to start processes within this task, --launcher local"
    return "\nor ".join(filter(None, (fitting_flags or "omit --nodes and --devices", command)))
