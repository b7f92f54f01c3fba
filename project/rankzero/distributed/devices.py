"""Assigns a device to each process and chooses the backend through which the processes communicate."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from rankzero.distributed.coordination.coordinator import Coordinator
from rankzero.distributed.environments.launch import Launch, RequestedWorld
from rankzero.distributed.process.limits.threads import choose_threads, set_threads
from rankzero.messages import RequestError, nearest

ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps")


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
        shares_gpu: Whether processes share a GPU.
        threads: Source of this process's number of threads, such as `12 cores / 4 ranks`.
    """

    accelerator: str
    size: int = 1
    nodes: int = 1
    devices: int = 1
    backend: str = "gloo"
    index: int = 0
    shares_gpu: bool = False
    threads: str = field(default="", compare=False)


def resolve_world(requested: RequestedWorld, coordinator: Coordinator) -> WorldInfo:
    """Assigns a device to every process and chooses the backend. All ranks must call.

    Raises:
        CannotStart: A requested device or backend is not available on at least one machine.
    """
    launch = coordinator.launch
    assignment = coordinator.run_on_all_ranks(lambda: assign_device(requested, launch))

    def choose(assignments: list[dict[str, Any]]) -> list[Any]:
        return _choose_backend(requested, [DeviceAssignment(**fields) for fields in assignments], coordinator.hosts)

    backend, shares_gpu = coordinator.decide(asdict(assignment), choose)
    assert launch.local_world_size and launch.num_nodes
    size, nodes, devices = launch.world_size, launch.num_nodes, launch.local_world_size
    threads = _set_torch_threads(coordinator)
    return WorldInfo(assignment.accelerator, size, nodes, devices, backend, assignment.index, shares_gpu, threads)


def _choose_backend(
    requested: RequestedWorld, assignments: Sequence[DeviceAssignment], hosts: Sequence[str]
) -> list[Any]:
    """Returns the backend, and whether processes share a GPU."""
    host_by_accelerator = {device.accelerator: host for device, host in zip(assignments, hosts, strict=True)}
    if len(host_by_accelerator) > 1:
        raise RequestError(
            "one accelerator for all processes",
            ", ".join(f"{accelerator} on {host}" for accelerator, host in host_by_accelerator.items()),
            "--accelerator cpu, or start the run only on machines with GPUs",
        )
    accelerator = assignments[0].accelerator
    process_counts = Counter((host, device.gpu) for device, host in zip(assignments, hosts, strict=True) if device.gpu)
    shares_gpu = any(count > 1 for count in process_counts.values())
    backend = requested.backend or ("nccl" if accelerator == "cuda" and not shares_gpu else "gloo")
    if backend == "nccl" and accelerator != "cuda":
        raise RequestError("--backend nccl", f"NCCL needs GPUs, but the run uses {accelerator}", "--backend gloo")
    if backend == "nccl" and shares_gpu:
        (host, _), count = process_counts.most_common(1)[0]
        raise RequestError(
            "--backend nccl",
            f"{count} processes share a GPU on {host}, but NCCL needs one GPU per process",
            f"--devices {len({gpu for gpu_host, gpu in process_counts if gpu_host == host})}, or --backend gloo",
        )
    return [backend, shares_gpu]


def _set_torch_threads(coordinator: Coordinator) -> str:
    """Sets torch's number of threads to this rank's share of the machine's cores; returns the source of the number.

    Under torchrun, the processes know one another only at this point, after torch is imported.
    """
    threads = choose_threads(coordinator.launch, coordinator.members)
    set_threads(threads)
    # A process that shares its cores with no other rank keeps torch's default, which excludes slower cores on some
    # machines.
    if threads.count and not threads.uses_all_cores and threads.count != torch.get_num_threads():
        torch.set_num_threads(threads.count)
    return threads.reason


def assign_device(requested: RequestedWorld, launch: Launch) -> DeviceAssignment:
    """Returns the device of this process.

    Raises:
        RequestError: The requested device does not exist on this machine.
    """
    accelerator = _choose_accelerator(requested.accelerator)
    processes = launch.local_world_size or 1
    if accelerator == "mps" and processes > 1:
        raise RequestError(f"{processes} processes with --accelerator mps", "one MPS device", "--accelerator cpu")
    check_gpus(requested, accelerator)
    if accelerator != "cuda":
        return DeviceAssignment(accelerator)
    visible_gpus, local_rank = torch.cuda.device_count(), launch.local_rank or 0
    indices = requested.gpus or range(visible_gpus)
    if max(indices) >= visible_gpus:
        raise RequestError(f"GPU {max(indices)}", f"{visible_gpus} GPUs, counted from 0", "--trainer.devices [0]")
    # With `srun --gpus-per-task=1`, each process sees only its own GPU, with index 0.
    index = indices[local_rank % len(indices)]
    return DeviceAssignment(accelerator, index, gpu_id(index))


def check_gpus(requested: RequestedWorld, accelerator: str) -> None:
    """Raises a RequestError if GPUs are requested and the run uses the CPU."""
    if accelerator == "cpu" and requested.gpus is not None:
        found = "indices of GPUs, but the run uses the CPU" if requested.gpus else "all GPUs, but the run uses the CPU"
        raise RequestError(f"devices={list(requested.gpus) or -1}", found, "devices=N, the number of processes")


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
    count = torch.cuda.device_count() if _choose_accelerator(requested.accelerator) == "cuda" else 1
    return 0 if count == 1 and launch.num_nodes == 1 else count


def _choose_accelerator(requested: object) -> str:
    gpu_count = torch.cuda.device_count()
    has_mps = torch.backends.mps.is_available()
    if requested == "auto":
        return "cuda" if gpu_count else "mps" if has_mps else "cpu"
    if requested in ("gpu", "cuda") and gpu_count:
        return "cuda"
    if requested in ("gpu", "mps") and has_mps:
        return "mps"
    if requested not in ACCELERATORS:
        instead = f"--accelerator {nearest(str(requested), ACCELERATORS) or 'auto'}"
        raise RequestError(f"--accelerator {requested}", f"there are {', '.join(ACCELERATORS)}", instead)
    if requested != "cpu":
        raise RequestError(
            f"--accelerator {requested}",
            f"no such device on this machine (torch {torch.__version__} sees {gpu_count} GPUs)",
            "--accelerator cpu, or auto",
        )
    return "cpu"


def synchronize(device: torch.device) -> None:
    """Waits until the device has done all work of this process; does nothing for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
