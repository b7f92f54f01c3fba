"""Is the world that the launcher made the one that was asked for? Imports no torch."""

import os

from rankzero.cli.arguments import Flags
from rankzero.distributed.environments.launch import Asked, Launch
from rankzero.messages import RequestError

PROCESSES_A_CORE = 16
"""More than so many processes on one machine are taken for a slip of the finger."""


def asked_of(flags: Flags) -> Asked:
    """What the command line says of the world."""
    return Asked(
        nodes=flags.values.get("trainer.num_nodes"),
        devices=flags.num_devices,
        node_rank=flags.get("node_rank"),
        address=flags.get("master_addr"),
        port=flags.get("master_port"),
    )


def check_shape(flags: Flags, launch: Launch) -> None:
    """Compares `--nodes` and `--devices` with the launcher's world, as far as that is known.

    Raises:
        RequestError: They differ, and the launcher cannot change its world later.
    """
    asked = asked_of(flags)
    if not launch.created or launch.elastic:
        return
    each = launch.processes_a_node
    wrong_nodes = asked.nodes is not None and launch.num_nodes not in (None, asked.nodes)
    wrong_devices = asked.devices is not None and (
        any(count != asked.devices for count in each) if each else launch.world_size % asked.devices != 0
    )
    wrong_product = None not in (asked.nodes, asked.devices) and _product(asked) != launch.world_size
    if not each and launch.num_nodes and asked.devices and launch.world_size != launch.num_nodes * asked.devices:
        wrong_devices = True
    if not (wrong_nodes or wrong_devices or wrong_product):
        return
    words = [f"--{name} {value}" for name, value in (("nodes", asked.nodes), ("devices", asked.devices)) if value]
    raise RequestError(
        " ".join(words),
        f"{launch.launcher} started {launch.shape} ({launch.evidence})",
        _instead(asked, launch),
    )


def processes_to_start(flags: Flags, launch: Launch) -> int:
    """How many processes this one has to start itself: those that were asked for, where no launcher has."""
    if launch.created or flags.only_prints:
        return 0
    count, most = flags.num_devices or 0, PROCESSES_A_CORE * (os.cpu_count() or 1)
    if count > most:
        raise RequestError(
            f"--devices {count}", f"{os.cpu_count()} cores on this machine", f"--devices {most}, or less"
        )
    return count


def _product(asked: Asked) -> int:
    return (asked.nodes or 1) * (asked.devices or 1)


def _instead(asked: Asked, launch: Launch) -> str:
    """The flags that fit the launcher, or the launcher's line that fits the flags."""
    each = launch.processes_a_node or ((launch.world_size // launch.num_nodes,) if launch.num_nodes else ())
    fitting = ""
    if launch.num_nodes and len(set(each)) == 1:
        fitting = f"--nodes {launch.num_nodes} --devices {each[0]}, or leave both out"
    nodes, devices = asked.nodes or launch.num_nodes or 1, asked.devices or (each[0] if each else 1)
    start = {
        "slurm": f"srun --nodes={nodes} --ntasks-per-node={devices} python launch/fit.py ...",
        "mpi": f"mpirun -np {nodes * devices} python launch/fit.py ...",
        "torchrun": f"torchrun --nnodes {nodes} --nproc-per-node {devices} launch/fit.py ...",
    }.get(launch.launcher)
    if launch.launcher == "slurm" and launch.world_size == 1:
        start = f"{start}\nor, to start processes in this task, --launcher local"
    return "\nor ".join(filter(None, (fitting or "leave --nodes and --devices out", start)))
