"""Assigns a device to each process and chooses the backend through which the processes communicate."""

from collections import Counter
from dataclasses import asdict, dataclass, field

import torch

from rankzero.distributed.coordinator import Coordinator
from rankzero.distributed.environments.launch import Launch, RequestedWorld
from rankzero.distributed.process.threads import choose_threads, set_threads
from rankzero.messages import RequestError


@dataclass(frozen=True)
class DeviceAssignment:
    """The device of one process.

    Args:
        accelerator: `cuda`, `mps` or `cpu`.
        index: Index of the GPU among the GPUs that this process sees.
        gpu: UUID of the GPU, unique on its machine; None without a GPU.
    """

    accelerator: str
    index: int = 0
    gpu: str | None = None


@dataclass(frozen=True)
class WorldInfo:
    """The devices and the backend of all processes.

    Args:
        accelerator: `cuda`, `mps` or `cpu`.
        size: Number of processes in total.
        nodes: Number of machines.
        devices: Number of processes on this machine.
        backend: `nccl` or `gloo`.
        index: Index of this process's GPU among the GPUs that it sees.
        shared: Whether processes share a GPU.
        threads: Source of this process's number of threads, such as `12 cores / 4 ranks`.
    """

    accelerator: str
    size: int = 1
    nodes: int = 1
    devices: int = 1
    backend: str = "gloo"
    index: int = 0
    shared: bool = False
    threads: str = field(default="", compare=False)


def resolve_world(requested: RequestedWorld, coordinator: Coordinator) -> WorldInfo:
    """Assigns a device to every process and chooses the backend. All ranks must call.

    Raises:
        CannotStart: A requested device or backend is not available on at least one machine.
    """
    launch = coordinator.launch
    assignment = coordinator.run_on_all_ranks(lambda: assign_device(requested, launch))
    assignments = [DeviceAssignment(**other) for other in coordinator.all_gather_object(asdict(assignment))]
    hosts = [member.host for member in coordinator.members]
    kinds = {other.accelerator: host for other, host in zip(assignments, hosts, strict=True)}
    if len(kinds) > 1:
        raise RequestError(
            "the same accelerator for all processes",
            ", ".join(f"{kind} on {host}" for kind, host in kinds.items()),
            "--accelerator cpu, or machines that all have GPUs",
        )
    gpus = Counter((host, other.gpu) for other, host in zip(assignments, hosts, strict=True) if other.gpu)
    shared = any(count > 1 for count in gpus.values())
    backend = requested.backend or ("nccl" if assignment.accelerator == "cuda" and not shared else "gloo")
    if backend == "nccl" and assignment.accelerator != "cuda":
        raise RequestError(
            "--backend nccl", f"NCCL needs GPUs, and this runs on {assignment.accelerator}", "--backend gloo"
        )
    if backend == "nccl" and shared:
        (host, _), count = gpus.most_common(1)[0]
        raise RequestError(
            "--backend nccl",
            f"{count} processes share a GPU on {host}, and NCCL needs one for each",
            f"--devices {len({gpu for where, gpu in gpus if where == host})}, or --backend gloo",
        )
    assert launch.local_world_size and launch.num_nodes
    size, nodes, devices = launch.world_size, launch.num_nodes, launch.local_world_size
    threads = _share_threads(coordinator)
    return WorldInfo(assignment.accelerator, size, nodes, devices, backend, assignment.index, shared, threads)


def _share_threads(coordinator: Coordinator) -> str:
    """Sets torch's number of threads to this rank's share of the machine's cores; returns the source of the number.

    Under torchrun, the processes know one another only at this point, after torch is imported.
    """
    threads = choose_threads(coordinator.launch, coordinator.members)
    set_threads(threads)
    # A process that shares its cores with no other rank keeps torch's default, which excludes slower cores on some
    # machines.
    if threads.count and not threads.all_cores and threads.count != torch.get_num_threads():
        torch.set_num_threads(threads.count)
    return threads.reason


def assign_device(requested: RequestedWorld, launch: Launch) -> DeviceAssignment:
    """Returns the device of this process.

    Raises:
        RequestError: The requested device does not exist on this machine.
    """
    accelerator = _accelerator(requested.accelerator)
    processes = launch.local_world_size or 1
    if accelerator == "mps" and processes > 1:
        raise RequestError(f"{processes} processes with --accelerator mps", "one MPS device", "--accelerator cpu")
    if accelerator != "cuda":
        return DeviceAssignment(accelerator)
    visible, local_rank = torch.cuda.device_count(), launch.local_rank or 0
    indices = requested.gpus or range(visible)
    if max(indices) >= visible:
        raise RequestError(f"GPU {max(indices)}", f"{visible} GPUs, counted from 0", "--trainer.devices [0]")
    # With `srun --gpus-per-task=1`, each process sees only its own GPU, with index 0.
    index = indices[local_rank % len(indices)]
    return DeviceAssignment(accelerator, index, gpu_id(index))


def gpu_id(index: int) -> str:
    """Returns the UUID of a GPU, which is the same in all processes, whatever its index in this process."""
    return str(torch.cuda.get_device_properties(index).uuid)


def processes_for_gpus(requested: RequestedWorld, launch: Launch) -> int:
    """Returns how many processes this one has to start: one per GPU, if the user gave no number. Imports torch.

    Returns:
        The number of processes, or 0 if this process does the work itself.
    """
    if launch.externally_created or requested.devices:
        return 0
    count = torch.cuda.device_count() if _accelerator(requested.accelerator) == "cuda" else 1
    return 0 if count == 1 and launch.num_nodes == 1 else count


def _accelerator(asked: object) -> str:
    gpus = torch.cuda.device_count()
    mps = torch.backends.mps.is_available()
    if asked == "auto":
        return "cuda" if gpus else "mps" if mps else "cpu"
    if asked in ("gpu", "cuda") and gpus:
        return "cuda"
    if asked in ("gpu", "mps") and mps:
        return "mps"
    if asked != "cpu":
        raise RequestError(
            f"--accelerator {asked}",
            f"no such device on this machine (torch {torch.__version__} sees {gpus} GPUs)",
            "--accelerator cpu, or auto to take what there is",
        )
    return "cpu"
