"""How many processes there are, on what devices, and how they talk to each other."""

import sys
from dataclasses import dataclass

import torch

from project.command_line import Flags
from project.environments.detect import Launch
from project.environments.local import run_processes
from project.errors import RequestError


@dataclass(frozen=True)
class World:
    """What was asked for, held against what is there.

    Args:
        accelerator: `cuda`, `mps` or `cpu`.
        devices: Processes a machine.
        nodes: Machines.
        backend: `nccl` or `gloo`.
        indices: Which GPUs of a machine; empty where they are counted from 0.
    """

    accelerator: str
    devices: int
    nodes: int
    backend: str
    indices: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Processes in all."""
        return self.nodes * self.devices


def resolve_world(flags: Flags, launch: Launch) -> World:
    """Works out the world.

    Raises:
        RequestError: What was asked for does not fit the launcher, or there are not as many GPUs.
    """
    accelerator = _accelerator(flags.values.get("trainer.accelerator") or "auto")
    nodes, devices = _shape(flags, launch, accelerator)
    if accelerator == "cuda" and devices > torch.cuda.device_count():
        raise RequestError(
            f"{devices} processes on this machine, each with a GPU",
            f"{torch.cuda.device_count()} GPU{'s' * (torch.cuda.device_count() != 1)} (torch.cuda.device_count())",
            f"--devices {torch.cuda.device_count()}, or --accelerator cpu",
        )
    if accelerator == "mps" and devices > 1:
        raise RequestError(f"{devices} processes with --accelerator mps", "one MPS device", "--accelerator cpu")
    backend = flags.get("backend") or ("nccl" if accelerator == "cuda" else "gloo")
    if backend == "nccl" and accelerator != "cuda":
        raise RequestError("--backend nccl", f"NCCL needs GPUs, and this runs on {accelerator}", "--backend gloo")
    indices = tuple(flags.devices) if isinstance(flags.devices, list) and accelerator == "cuda" else ()
    return World(accelerator, devices, nodes, backend, indices)


def start_processes(flags: Flags, world: World, launch: Launch) -> int | None:
    """Starts a process for each GPU there is, where nobody gave a number and no launcher has started them.

    Returns:
        The exit code once all have left; None where this process is to do the work itself.
    """
    if launch.created or flags.only_prints or world.devices == 1:
        return None
    return run_processes([sys.executable, *sys.argv, f"--devices={world.devices}"], world.devices)


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


def _shape(flags: Flags, launch: Launch, accelerator: str) -> tuple[int, int]:
    """Machines, and processes a machine."""
    asked_nodes = flags.values.get("trainer.num_nodes")
    asked_devices = flags.num_devices
    if launch.world_size != launch.num_nodes * launch.devices:
        raise RequestError(
            f"{launch.world_size} processes on {launch.num_nodes} nodes ({launch.evidence})",
            "not as many on each node as on the others",
            "the same number of tasks on each node, such as srun --ntasks-per-node N",
        )
    if launch.created:
        for name, asked, there in (
            ("nodes", asked_nodes, launch.num_nodes),
            ("devices", asked_devices, launch.devices),
        ):
            if asked is not None and asked != there:
                raise RequestError(
                    f"--{name} {asked}",
                    f"{launch.launcher} started {launch.num_nodes} x {launch.devices} processes "
                    f"(nodes x devices; {launch.evidence})",
                    f"--{name} {there}, or leave it out",
                )
        return launch.num_nodes, launch.devices
    if asked_nodes not in (None, 1):
        raise RequestError(
            f"--nodes {asked_nodes}",
            f"one process on one machine; {launch.evidence}",
            f"srun python launch/fit.py --nodes {asked_nodes} ..., or torchrun --nnodes {asked_nodes} ...",
        )
    return 1, asked_devices or (torch.cuda.device_count() if accelerator == "cuda" else 1)
