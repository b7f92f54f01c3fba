"""The user's environment: the folder of settings, and the variables without a job's. Does not import torch."""

import os
from pathlib import Path


def config_folder() -> Path | None:
    """Returns the user's folder for Rankzero (XDG base directories); None if the user has no home directory."""
    for base, *subfolders in (("XDG_CONFIG_HOME",), ("HOME", ".config")):
        folder = Path(os.environ.get(base) or "")
        if folder.is_absolute():
            return folder.joinpath(*subfolders, "rankzero")
    return None


_OF_JOBS = {"SLURM_": "SLURM_JOB_ID", "PBS_": "PBS_JOBID"}
"""Prefix of a scheduler's variables -> the variable that exists in its jobs only."""

_OF_LAUNCHERS = ("OMPI_COMM_WORLD_", "PMI_", "PMIX_", "MPI_LOCAL", "TORCHELASTIC_", "GROUP_", "ROLE_")
_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SETTINGS = ("SLURM_CONF", "PBS_CONF_FILE", "PBS_DEFAULT")
"""Variables with the prefix of a job's variables that a user or a site sets."""


def without_job_variables() -> dict[str, str]:
    """Returns this process's variables without those that a scheduler or a launcher sets for a job.

    In a shell of `salloc`, sbatch would apply some of them to the new job, such as `SLURM_MEM_PER_CPU`.
    """
    prefixes = (*_OF_LAUNCHERS, *(prefix for prefix, evidence in _OF_JOBS.items() if evidence in os.environ))
    return {
        name: value
        for name, value in os.environ.items()
        if name in _SETTINGS or not (name.startswith(prefixes) or name in _RANKS)
    }
