"""Environment for programs that must not take this process for a part of a job. Does not import torch."""

import os

_PREFIXES = ("SLURM_", "PBS_", "OMPI_", "PMI_", "PMIX_", "MPI_", "TORCHELASTIC_")
_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SETTINGS = ("SLURM_CONF", "PBS_CONF_FILE", "PBS_EXEC", "PBS_SERVER", "OMPI_ALLOW_RUN_AS_ROOT")


def without_job_variables() -> dict[str, str]:
    """Returns this process's variables without those that a scheduler or a launcher sets for a job.

    In a shell of `salloc`, sbatch would apply some of them to the new job, such as `SLURM_MEM_PER_CPU`.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_SETTINGS) or not (name.startswith(_PREFIXES) or name in _NAMES)
    }
