"""The device of each process, the backend through which the processes communicate, and copies between devices."""

import os
import shutil
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rankzero.distributed.environments.launch import Launch, RequestedWorld
from rankzero.distributed.process.system import cpus_near, format_cpus, parse_cpus
from rankzero.distributed.process.threads import choose_threads, set_threads
from rankzero.distributed.torch_inside import onednn_supports_bf16
from rankzero.distributed.world import World
from rankzero.messages import RequestError, nearest, print_error

if TYPE_CHECKING:
    from rankzero.distributed.coordination.coordinator import Coordinator

ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps")

NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
"""Has one entry for each GPU that NVIDIA's kernel driver knows, also if this process may not use it."""

_CUDA_ERRORS = (RuntimeError, AssertionError, torch.cuda.DeferredCudaCallError)
"""What torch raises if CUDA cannot be initialized, or if it has fewer GPUs than the driver lists."""

CPU_FEATURES = {"avx512_bf16", "amx_bf16", "bf16"}
"""Linux's names for bfloat16 arithmetic: on Intel and AMD, on Intel only, on Arm."""

CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Device:
    """The device of one process.

    Args:
        accelerator: `cuda`, `mps` or `cpu`.
        index: Index of the GPU among the GPUs that this process sees.
        gpu: UUID of the GPU, or of the part of a GPU (MIG), unique on its machine; None without a GPU.
        pci: PCI address of the whole GPU, by which NCCL recognizes shared GPUs; None if NCCL allows them.
        cpus: CPUs next to the GPU that this process may use, in Linux's notation; empty if unknown.
    """

    accelerator: str
    index: int = 0
    gpu: str | None = None
    pci: str | None = None
    cpus: str = ""


def resolve_world(requested: RequestedWorld, coordinator: "Coordinator") -> World:
    """Assigns a device to every process, chooses the backend, and returns the world. All ranks must call.

    Raises:
        CannotStart: A requested device or backend is not available on at least one machine.
    """
    world = coordinator.world
    assignment = coordinator.run_on_all_ranks(lambda: assign_device(requested, world.launch))

    def choose(assignments: list[Any]) -> list[Any]:
        devices = [Device(**fields) for fields in assignments]
        return [*_choose_backend(requested, devices, world.hosts), _can_bind(devices, world)]

    world.backend, world.shares_gpu, binds = coordinator.decide(asdict(assignment), choose)
    if binds:
        os.sched_setaffinity(0, parse_cpus(assignment.cpus))
    if assignment.accelerator == "cpu" and requested.accelerator == "auto" and not world.rank:
        _warn_of_unused_gpus()
    threads = choose_threads(world)  # under torchrun, the processes know one another only now, with torch imported
    set_threads(threads)
    # A process that shares its cores with no other rank keeps torch's default, which excludes slower cores on some
    # machines.
    if threads.count and not threads.uses_all_cores and threads.count != torch.get_num_threads():
        torch.set_num_threads(threads.count)
    world.accelerator, world.index, world.threads = assignment.accelerator, assignment.index, threads.reason
    return world


def _choose_backend(requested: RequestedWorld, assignments: Sequence[Device], hosts: Sequence[str]) -> list[Any]:
    """Returns the backend, and whether processes share a GPU.

    By default, processes share GPUs only on a single host. On several hosts, one lost GPU must not make a run slow.
    """
    host_by_accelerator = {device.accelerator: host for device, host in zip(assignments, hosts, strict=True)}
    if len(host_by_accelerator) > 1:
        raise RequestError(
            "one accelerator for all processes",
            ", ".join(f"{accelerator} on {host}" for accelerator, host in host_by_accelerator.items()),
            "--accelerator cpu, or start the run only on machines with GPUs",
        )
    accelerator = assignments[0].accelerator
    placed = list(zip(hosts, assignments, strict=True))
    shares_gpu = max(Counter((host, device.gpu) for host, device in placed if device.gpu).values(), default=1) > 1
    for_nccl = Counter((host, device.pci) for host, device in placed if device.pci)
    (shared_host, pci), count = for_nccl.most_common(1)[0] if for_nccl else (("", None), 1)
    backend = requested.backend or ("nccl" if accelerator == "cuda" and count == 1 else "gloo")
    if backend == "nccl" and accelerator != "cuda":
        raise RequestError("--backend nccl", f"NCCL needs GPUs, but the run uses {accelerator}", "--backend gloo")
    if count > 1 and (backend == "nccl" or (not requested.backend and len(set(hosts)) > 1)):
        is_divided = len({device.gpu for host, device in placed if (host, device.pci) == (shared_host, pci)}) > 1
        gpus, processes = sum(host == shared_host for host, _ in for_nccl), list(hosts).count(shared_host)
        found = f"{count} processes share a GPU on {shared_host}{' as MIG instances' * is_divided}"
        without = f", or start the run without {shared_host}" * (len(set(hosts)) > 1)
        enable = ", or NCCL_MULTI_RANK_GPU_ENABLE=1 with NCCL 2.30 or newer" * is_divided
        raise RequestError(
            "--backend nccl" if requested.backend else f"{len(hosts)} processes, each with its own GPU",
            f"{found} ({processes} processes, {gpus} GPU{'s' * (gpus > 1)}), but NCCL needs one GPU per process",
            f"--devices {gpus}{without}{enable}, or --backend gloo",
        )
    return [backend, shares_gpu]


def _can_bind(assignments: Sequence[Device], world: World) -> bool:
    """Whether each rank keeps its share of its machine's cores if it uses only the cores next to its GPU."""
    ranks_on: dict[str, list[int]] = {}
    for rank, host in enumerate(world.hosts):
        ranks_on.setdefault(host, []).append(rank)
    for ranks in ranks_on.values():
        cores = frozenset[int]().union(*(parse_cpus(world.peers[rank].cores) for rank in ranks))
        for cpus, count in Counter(assignments[rank].cpus for rank in ranks).items():
            if not cpus or len(parse_cpus(cpus) & cores) * len(ranks) < len(cores) * count:
                return False
    return True


def _warn_of_unused_gpus() -> None:
    """Prints why the run uses the CPU, if this machine has GPUs of NVIDIA and the user has not hidden them."""
    count = len(list(NVIDIA_GPUS.glob("*")))
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1", "NoDevFiles")
    if not is_hidden and (count or shutil.which("nvidia-smi")):
        gpus = f"{count or 'the'} NVIDIA GPU{'s' * (count != 1)} of {socket.gethostname()}"
        print_error(
            f"warning: the run uses the CPU: torch {torch.__version__} cannot use {gpus}: {_cuda_problem()}\n"
            "  install a torch built for CUDA, repair the driver, or request GPUs from the scheduler; "
            "--accelerator cpu avoids this warning"
        )


def _cuda_problem() -> str:
    """Returns why torch can use no GPU, such as a driver that is too old."""
    try:
        torch.cuda.init()
    except _CUDA_ERRORS as error:
        return str(error).splitlines()[0]
    return "there is none"


def assign_device(requested: RequestedWorld, launch: Launch) -> Device:
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
        return Device(accelerator)
    visible_gpus, local_rank = torch.cuda.device_count(), launch.local_rank or 0
    indices = requested.gpus or range(visible_gpus)
    if max(indices) >= visible_gpus:
        raise RequestError(f"GPU {max(indices)}", f"{visible_gpus} GPUs, counted from 0", "--trainer.devices [0]")
    # With `srun --gpus-per-task=1`, each process sees only its own GPU, with index 0.
    return _use_gpu(indices[local_rank % len(indices)], visible_gpus)


def _use_gpu(index: int, visible_gpus: int) -> Device:
    """Makes a GPU the current device of this process, before any call creates a context on GPU 0.

    Raises:
        RequestError: CUDA cannot use the GPU, although the driver lists it.
    """
    try:
        torch.cuda.set_device(index)
        properties: Any = torch.cuda.get_device_properties(index)
    except _CUDA_ERRORS as error:
        usable, instead = torch.cuda.device_count(), "--accelerator cpu, or free the GPU or repair the driver"
        raise RequestError(
            f"GPU {index} of {socket.gethostname()}",
            f"the driver lists {visible_gpus} GPUs, but CUDA cannot use this one: {str(error).splitlines()[0]}",
            f"--devices {usable}" if 0 < usable < visible_gpus else f"{instead} (nvidia-smi)",
        ) from error
    pci = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    allows_sharing = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") != "0" and torch.cuda.nccl.version() >= (2, 30)
    return Device("cuda", index, str(properties.uuid), None if allows_sharing else pci, format_cpus(cpus_near(pci)))


def check_gpus(requested: RequestedWorld, accelerator: str) -> None:
    """Raises a RequestError if GPUs are requested and the run uses the CPU."""
    if accelerator == "cpu" and requested.gpus is not None:
        found = "indices of GPUs, but the run uses the CPU" if requested.gpus else "all GPUs, but the run uses the CPU"
        raise RequestError(f"devices={list(requested.gpus) or -1}", found, "devices=N, the number of processes")


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
        problem = f": {_cuda_problem()}" if requested != "mps" else ""
        raise RequestError(
            f"--accelerator {requested}",
            f"no such device on this machine (torch {torch.__version__} sees {gpu_count} GPUs{problem})",
            "--accelerator cpu, or auto",
        )
    return "cpu"


def synchronize(device: torch.device) -> None:
    """Waits until the device has done all work of this process; does nothing for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor on a device; a copy to a GPU begins now, and the host does not wait for it."""
    is_copied_to_gpu = device.type == "cuda" and not tensor.is_cuda
    return tensor.pin_memory().to(device, non_blocking=True) if is_copied_to_gpu else tensor.to(device)


class GatheredRows:
    """Rows of all ranks that are being gathered in host memory.

    Args:
        rows: The rows, of shape `(ranks, columns)`; complete once the collective has ended.
        work: The collective; None without one.
    """

    def __init__(self, rows: Tensor, work: torch.distributed.Work | None = None) -> None:
        self._rows, self._work = rows, work
        self._copied: torch.cuda.Event | None = None
        if rows.is_cuda:
            if work is not None:
                work.wait()  # makes the stream wait, not the host
            self._rows = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            self._rows.copy_(rows, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    @property
    def is_complete(self) -> bool:
        """Whether `wait` returns at once."""
        if self._copied is not None:
            return bool(self._copied.query())
        return self._work is None or self._work.is_completed()

    def wait(self) -> Tensor:
        """Returns the rows, after they have arrived."""
        if self._copied is not None:
            self._copied.synchronize()
        elif self._work is not None:
            self._work.wait()
        return self._rows


class HostCopy:
    """One copy of all numbers of a row, which begins now and is read later.

    Reading a number of a GPU waits until the GPU has finished all work before it. Reading them one by one at once would
    therefore empty the GPU's queue; reading a copy that was begun some steps earlier does not wait.

    Args:
        values: Values by name. Only floating-point tensors with one element are copied.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)
        self._names = [
            name
            for name, value in values.items()
            if isinstance(value, Tensor) and value.is_cuda and value.is_floating_point() and value.numel() == 1
        ]
        self._copy: GatheredRows | None = None
        if self._names:
            numbers = [self._values[name].detach().reshape(()) for name in self._names]
            self._copy = GatheredRows(torch.stack(numbers).double().unsqueeze(0))

    @property
    def is_complete(self) -> bool:
        """Whether `wait` returns at once."""
        return self._copy is None or self._copy.is_complete

    def wait(self) -> dict[str, Any]:
        """Returns the values, those of a GPU as numbers, after the copy has arrived."""
        if self._copy is not None:
            self._values.update(zip(self._names, self._copy.wait()[0].tolist(), strict=True))
            self._copy = None
        return self._values


def computes_in_bf16(accelerator: str) -> bool:
    """Returns whether the device of this process computes in bfloat16 without emulation."""
    if accelerator == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if accelerator != "cpu" or not CPUINFO.is_file():  # not Linux
        return False
    features = [line.split() for line in CPUINFO.read_text().splitlines() if line.startswith(("flags", "Features"))]
    return not all(map(CPU_FEATURES.isdisjoint, features)) and onednn_supports_bf16()
