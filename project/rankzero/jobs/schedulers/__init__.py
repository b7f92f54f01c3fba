"""Commands and states of each scheduler."""

from types import ModuleType

from rankzero.jobs.record import Record, State
from rankzero.jobs.schedulers import background, flux, kubernetes, lsf, pbs, slurm

QUEUES: dict[str, ModuleType] = {"slurm": slurm, "pbs": pbs, "lsf": lsf, "flux": flux, "kubernetes": kubernetes}
"""Name of each scheduler with a queue -> its module."""


def job_state(record: Record) -> State:
    """Returns the state of a job."""
    state: State = QUEUES.get(record.scheduler, background).state(record)
    return state
