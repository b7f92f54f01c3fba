"""Which launcher started this process: decided from evidence, most specific first. Imports no torch."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from project.errors import RequestError

LOCAL_MARK = "RANKZERO_LOCAL"
"""Set for the processes that `project.environments.local` starts, to its own process id."""


@dataclass(frozen=True)
class Launch:
    """Where this process stands.

    Args:
        launcher: `local`, `torchrun` or `slurm`.
        evidence: The variables that say so, for a person to read.
        rank: This process among all.
        local_rank: This process among those of its machine.
        world_size: Processes in all.
        num_nodes: Machines.
        node_rank: This machine among all.
        job_id: What the scheduler or torchrun calls the job; the same after a requeue or a restart.
        created: True where the launcher has already started one process a device.
    """

    launcher: str = "local"
    evidence: str = "no launcher's variables are set"
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    num_nodes: int = 1
    node_rank: int = 0
    job_id: str | None = None
    created: bool = False

    @property
    def devices(self) -> int:
        """Processes a machine."""
        return self.world_size // self.num_nodes


def detect(launcher: str = "auto", environ: Mapping[str, str] | None = None) -> Launch:
    """Reads the launcher's variables.

    Args:
        launcher: What `--launcher` says; `auto` looks at the evidence.
        environ: The variables; this process's own by default.

    Raises:
        RequestError: `launcher` names one whose variables are not there, or one of them is no number.
    """
    environ = os.environ if environ is None else environ
    readers = {"local": _local, "torchrun": _torchrun, "slurm": _slurm}
    try:
        if launcher != "auto":
            found = readers[launcher](environ) or (Launch(evidence="--launcher local") if launcher == "local" else None)
        else:
            found = _local(environ) or _torchrun(environ) or _slurm(environ) or Launch()
    except (KeyError, ValueError) as error:
        raise RequestError(
            f"--launcher {launcher}",
            f"the launcher's variables are incomplete: {error}",
            "python launch/fit.py --launcher local, or start it anew with torchrun or srun",
        ) from None
    if found is None:
        start = {"torchrun": "torchrun --nproc-per-node N", "slurm": "srun python"}[launcher]
        raise RequestError(
            f"--launcher {launcher}",
            f"none of its variables is set, so this process was not started by {launcher}",
            f"{start} launch/fit.py ..., or leave --launcher out",
        )
    return found


def _local(environ: Mapping[str, str]) -> Launch | None:
    if LOCAL_MARK not in environ:
        return None
    return Launch(
        launcher="local",
        evidence=f"--devices {environ['LOCAL_WORLD_SIZE']}, no launcher's variables are set",
        rank=int(environ["RANK"]),
        local_rank=int(environ["LOCAL_RANK"]),
        world_size=int(environ["WORLD_SIZE"]),
        created=True,
    )


def _torchrun(environ: Mapping[str, str]) -> Launch | None:
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    job_id = environ["TORCHELASTIC_RUN_ID"]
    if re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", job_id):
        job_id = job_id[:8]  # a UUID that torchrun drew because --rdzv-id was not given
    return Launch(
        launcher="torchrun",
        evidence=f"TORCHELASTIC_RUN_ID={job_id}",
        rank=int(environ["RANK"]),
        local_rank=int(environ["LOCAL_RANK"]),
        world_size=int(environ["WORLD_SIZE"]),
        num_nodes=int(environ["GROUP_WORLD_SIZE"]),
        node_rank=int(environ["GROUP_RANK"]),
        job_id=None if job_id == "none" else job_id,  # older torchrun's word where --rdzv-id was not given
        created=True,
    )


def _slurm(environ: Mapping[str, str]) -> Launch | None:
    # SLURM_NTASKS alone is no evidence: sbatch exports it to the batch script, where no task has been started.
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return None
    return Launch(
        launcher="slurm",
        evidence=f"SLURM_JOB_ID={environ['SLURM_JOB_ID']} SLURM_STEP_ID={environ['SLURM_STEP_ID']}",
        rank=int(environ["SLURM_PROCID"]),
        local_rank=int(environ["SLURM_LOCALID"]),
        world_size=int(environ["SLURM_STEP_NUM_TASKS"]),
        num_nodes=int(environ["SLURM_STEP_NUM_NODES"]),
        node_rank=int(environ["SLURM_NODEID"]),
        job_id=environ["SLURM_JOB_ID"],
        created=True,
    )
