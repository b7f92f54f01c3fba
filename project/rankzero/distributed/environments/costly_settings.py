"""Settings of a launcher that cost speed or end a run. Does not import torch."""

import os
from collections.abc import Mapping
from typing import NamedTuple

from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.network import GLOO


class CostlySetting(NamedTuple):
    """A setting that costs speed or ends a run.

    Args:
        problem: What the setting does.
        advice: What to type instead.
        ends_run: Whether a run cannot begin with it.
    """

    problem: str
    advice: str
    ends_run: bool = False


def costly_settings(
    launch: Launch, cores: int, visible_gpus: int, environ: Mapping[str, str] = os.environ
) -> list[CostlySetting]:
    """Returns the settings of a launcher, and the variables, that cost speed or end a run.

    Args:
        launch: The position of this process among all processes.
        cores: Number of cores that this process may use.
        visible_gpus: Number of GPUs that this process sees.
        environ: The environment variables.
    """
    settings = []
    local_ranks = launch.local_world_size or 1
    if visible_gpus == 1 and local_ranks > 1 and launch.launcher in ("slurm", "mpi"):
        settings.append(
            CostlySetting(
                "each rank sees only its own GPU, so that NCCL cannot connect GPUs directly (NVIDIA/nccl#1066)",
                f"srun --gpus-per-node={local_ranks} in place of --gpus-per-task=1",
            )
        )
    cores_of_node = environ.get("SLURM_CPUS_ON_NODE", "")
    fair_share = int(cores_of_node) // local_ranks if cores_of_node.isdecimal() else 0
    if launch.launcher == "slurm" and "SLURM_CPUS_PER_TASK" not in environ and cores < fair_share:
        settings.append(
            CostlySetting(
                f"srun without --cpus-per-task gives each rank {cores} of {cores_of_node} cores",
                f"srun --cpus-per-task={fair_share}",
            )
        )
    interface = environ.get(GLOO, "")
    if interface.startswith(("^", "=")):
        settings.append(
            CostlySetting(
                f"{GLOO}={interface} has NCCL's syntax, with which gloo ends the process",
                f"unset {GLOO}, or set it to the name of one interface; --interface NAME sets it for all ranks",
                ends_run=True,
            )
        )
    return settings
