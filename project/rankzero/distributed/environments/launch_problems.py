"""Settings that cost speed, end a run, or should be equal on all ranks."""

import os
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from rankzero.distributed.coordination.network import GLOO
from rankzero.distributed.environments.launch import Launch

PREFIXES = ("NCCL_", "GLOO_", "OMP_", "CUDA_", "TORCH_", "MKL_", "KMP_", "PYTORCH_")

VARIES_BY_RANK = (
    *("CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS"),
    *("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "NCCL_DEBUG_FILE", "CUDA_MPS_"),
)
"""Variables that may differ between ranks, or beginnings of their names: launchers and Rankzero set them per rank."""


def relevant_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the variables that change how ranks compute or communicate, and that should be equal on all ranks."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(PREFIXES) and not name.startswith(VARIES_BY_RANK)
    }


class LaunchProblem(NamedTuple):
    """A setting that costs speed or ends a run.

    Args:
        problem: What the setting does.
        advice: What to type instead.
        ends_run: Whether a run cannot begin with it.
    """

    problem: str
    advice: str
    ends_run: bool = False


def launch_problems(
    launch: Launch, cpus: int, hides_gpus: bool, uses_gloo: bool, environ: Mapping[str, str] = os.environ
) -> Iterator[LaunchProblem]:
    """Yields the settings of a launcher, and the variables, that cost speed or end a run.

    Args:
        launch: The position of this process among all processes.
        cpus: Number of CPUs (hardware threads) that this process may use.
        hides_gpus: Whether this process sees only its own GPU, and its machine has more of them.
        uses_gloo: Whether the ranks communicate by gloo.
        environ: The environment variables.
    """
    local_ranks = launch.local_world_size or 1
    if hides_gpus and launch.launcher in ("slurm", "mpi"):
        yield LaunchProblem(
            "each rank sees only its own GPU, so that NCCL cannot connect GPUs directly (NVIDIA/nccl#1066)",
            f"let each rank see all GPUs of its machine: srun --gpus-per-node={local_ranks}, not --gpus-per-task=1",
        )
    fair_share = _number(environ, "SLURM_CPUS_ON_NODE") // local_ranks
    cpus_per_task = _number(environ, "SLURM_CPUS_PER_TASK")  # of sbatch or srun; srun does not use sbatch's
    if launch.launcher == "slurm" and cpus < fair_share and not 0 < cpus_per_task <= cpus:
        problem = f"srun without --cpus-per-task gives each rank {cpus} of {environ['SLURM_CPUS_ON_NODE']} CPUs"
        yield LaunchProblem(problem, f"srun --cpus-per-task={fair_share}")
    if has_invalid_interface(environ):
        yield LaunchProblem(
            f"{GLOO}={environ[GLOO]} has NCCL's syntax, with which gloo aborts the process",
            f"unset {GLOO}, or set it to the name of one interface; --interface NAME sets it for all ranks",
            ends_run=uses_gloo,
        )


def has_invalid_interface(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether gloo's interface is given in the syntax of NCCL, such as `^lo` or `=eth0`."""
    return environ.get(GLOO, "").startswith(("^", "="))


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else 0
