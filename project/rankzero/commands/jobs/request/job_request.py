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
    """A run of `fit` as a job. The fields are the flags of `submit` and the keys of a site file.

    Args:
        scheduler: The program that starts the job: one of `FORMS`.
        name: Name of the run, and of the job.
        form: The program that starts the processes: one of `FORMS[scheduler]`; None if the scheduler has only one way.
        root: Folder of the runs; the script is written to it.
        nodes: Number of machines.
        devices: Number of processes per machine.
        cpus_per_device: Processor cores and threads per process; None leaves both to the scheduler.
        gpus_per_device: 1 requests a GPU for each process, 0 requests none; for queues and containers.
        memory: Memory per machine, a number with the unit K, M, G or T.
        time: Time limit in seconds.
        partition: Partition (Slurm) or queue (PBS).
        account: Account (Slurm) or project (PBS) to charge.
        constraint: Required features of the machines: Slurm's `--constraint`, or `name=value` for a chunk of PBS.
        exclude: Machines not to use (Slurm).
        mail: Address for mail about the end of the job.
        array: Indices of a job array, such as `0-3`; `{array_index}` in fit's arguments is replaced by the index.
        dependency: Jobs to wait for, such as `afterok:123`.
        modules: Environment modules to load before training.
        setup: Shell commands to run before training, unchanged.
        venv: Folder of the virtual environment whose Python runs; None for the Python that runs `submit`.
        image: Container image in which to train; its Python is called `python` and has Rankzero installed.
        hosts: Machines, for schedulers that do not choose them; the first one gets rank zero.
        hostfile: File of machines for mpirun, instead of `hosts`.
        extra: Lines to insert after the options of the scheduler, unchanged.
        arguments: The arguments of `fit`.
    """

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
