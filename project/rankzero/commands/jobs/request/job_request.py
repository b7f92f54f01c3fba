"""The options of a job. Does not import torch."""

from dataclasses import dataclass

FORMS: dict[str, tuple[str, ...]] = {
    "slurm": ("srun", "torchrun"),
    "pbs": ("pbsdsh", "torchrun", "mpirun"),
    "mpirun": ("openmpi", "mpich"),
    "ssh": (),
    "docker": (),
    "apptainer": (),
    "local": (),
}
"""Scheduler -> its forms, the programs that start the processes, with the default first."""

QUEUING = ("slurm", "pbs")
"""Schedulers with a queue. All others start a job at once, on this machine or from it."""


@dataclass(frozen=True)
class JobRequest:
    """A run of `fit` as a job. The fields are the flags of `submit` and the keys of a site file."""

    scheduler: str
    name: str
    form: str | None = None
    root: str = "runs"
    nodes: int = 1
    devices: int = 1
    cpus_per_device: int | None = None
    gpus_per_device: int = 0
    memory: str | None = None
    time: int | None = None
    partition: str | None = None
    account: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    mail: str | None = None
    array: str | None = None
    dependency: str | None = None
    modules: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    venv: str | None = None
    image: str | None = None
    hosts: tuple[str, ...] = ()
    hostfile: str | None = None
    extra: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()


def array_indices(array: str) -> list[int]:
    """Returns the indices of a job array, such as 0, 2 and 4 for `0-5:2`."""
    indices: list[int] = []
    for part in array.partition("%")[0].split(","):
        bounds, _, step = part.partition(":")
        first, _, last = bounds.partition("-")
        indices += range(int(first), int(last or first) + 1, int(step or 1))
    return indices
