"""Runs a scheduler's programs, without a hang and without an exception."""

import os
import shutil
import subprocess
from dataclasses import dataclass

from rankzero.distributed.environments.launchers.pbs import pbs_setting
from rankzero.distributed.timers import TIMERS


@dataclass(frozen=True)
class Answer:
    """The output of a program.

    Args:
        ok: Whether the program exists, answered in time and exited with 0.
        text: The output of the program, or the reason if `ok` is False.
    """

    ok: bool
    text: str


def run_program(*command: str) -> Answer:
    """Runs a scheduler's program with times in UTC and without the user's `SQUEUE_*` settings for squeue's output."""
    if (program := find_program(command[0])) is None:
        return Answer(False, "not found on PATH")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    environment["TZ"] = "UTC0"
    try:
        completed = subprocess.run(
            [program, *command[1:]],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMERS.scheduler,
        )
    except subprocess.TimeoutExpired:
        return Answer(False, f"no answer within {TIMERS.scheduler:g} s")
    except (OSError, ValueError) as error:
        return Answer(False, str(error))
    out, err = (stream.decode(errors="replace").strip() for stream in (completed.stdout, completed.stderr))
    if completed.returncode:
        return Answer(False, err or out or f"exited with code {completed.returncode}")
    return Answer(True, out)


def find_program(name: str) -> str | None:
    """Returns the path of a program on PATH or in the folder of LSF's or PBS's programs; None if it is in none of them.

    The tasks that `pbsdsh` starts have only `/bin:/usr/bin` on their PATH (OpenPBS 23.06), and a login shell sets PATH.
    """
    pbs = pbs_setting("PBS_EXEC")
    folders = filter(None, (os.environ.get("LSF_BINDIR"), pbs and f"{pbs}/bin"))
    return shutil.which(name) or next(filter(None, (shutil.which(name, path=folder) for folder in folders)), None)


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
