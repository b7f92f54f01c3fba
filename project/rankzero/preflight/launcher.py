"""Checks what the launcher has started, and its settings that cost speed."""

import os
from collections.abc import Mapping
from typing import Any

import torch

from rankzero.distributed.coordinator import Coordinator
from rankzero.distributed.devices import WorldInfo
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.network import GLOO
from rankzero.distributed.process.cores import usable_cores
from rankzero.preflight.check import FAIL, OK, WARN, Check, describe_ranks


def check_launcher(coordinator: Coordinator, world: WorldInfo) -> Check:
    """Reports the detected launcher, threads and cores per rank. All ranks must call."""
    launch = coordinator.launch
    own = {
        "threads": torch.get_num_threads(),
        "cores": len(usable_cores()),
        "machine_cores": os.cpu_count() or 1,
        "visible_gpus": torch.cuda.device_count(),
        "problems": [problem for problem, _ in launcher_problems(launch, os.environ, torch.cuda.device_count())],
        "advice": [advice for _, advice in launcher_problems(launch, os.environ, torch.cuda.device_count())],
        "fails": has_invalid_interface(os.environ),
    }
    ranks: list[dict[str, Any]] = coordinator.all_gather_object(own)
    hosts = [member.host for member in coordinator.members]
    ranks_of: dict[str, list[int]] = {}
    for rank, values in enumerate(ranks):
        for problem in values["problems"]:
            ranks_of.setdefault(problem, []).append(rank)
    details = [f"{problem}: {describe_ranks(affected, hosts)}" for problem, affected in ranks_of.items()]
    advice = list(dict.fromkeys(text for values in ranks for text in values["advice"]))
    status = FAIL if any(values["fails"] for values in ranks) else WARN if details else OK
    threads = sorted({values["threads"] for values in ranks})
    cores = sorted({values["cores"] for values in ranks})
    summary = (
        f"{launch.launcher} ({launch.evidence}): {launch.shape} on {world.accelerator}, {_range(threads)} thread"
        f"{'s' * (threads[-1] > 1)} and {_range(cores)} core{'s' * (cores[-1] > 1)} per rank"
    )
    values = {"launcher": launch.launcher, "variables": dict(launch.variables), "ranks": ranks}
    return Check("launcher", status, summary, tuple(details), tuple(advice), values)


def launcher_problems(launch: Launch, environ: Mapping[str, str], visible_gpus: int) -> list[tuple[str, str]]:
    """Returns the settings of a launcher that cost speed or end a run, each with advice.

    Args:
        launch: The position of this process.
        environ: The environment variables.
        visible_gpus: Number of GPUs that this process sees.
    """
    problems = []
    local_ranks = launch.local_world_size or 1
    if visible_gpus == 1 and local_ranks > 1 and launch.launcher in ("slurm", "openmpi", "mpich"):
        problems.append(
            (
                "each rank sees only its own GPU, so that NCCL cannot connect GPUs directly (NVIDIA/nccl#1066)",
                "srun --gpus-per-node=N in place of --gpus-per-task=1",
            )
        )
    cores = len(usable_cores())
    cores_of_job = int(environ.get("SLURM_CPUS_ON_NODE") or 0)
    if launch.launcher == "slurm" and "SLURM_CPUS_PER_TASK" not in environ and cores < cores_of_job // local_ranks:
        problems.append(
            (
                f"srun without --cpus-per-task gives each rank {cores} of {cores_of_job} cores",
                f"srun --cpus-per-task={cores_of_job // local_ranks}",
            )
        )
    if has_invalid_interface(environ):
        problems.append(
            (
                f"{GLOO}={environ[GLOO]} is NCCL's syntax, with which gloo ends the process",
                f"unset {GLOO}, or set it to the name of one interface; --interface NAME sets it for all ranks",
            )
        )
    return problems


def has_invalid_interface(environ: Mapping[str, str]) -> bool:
    """Whether gloo's interface is given in the syntax of NCCL, such as `^lo` or `=eth0`."""
    return environ.get(GLOO, "").startswith(("^", "="))


def _range(numbers: list[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
