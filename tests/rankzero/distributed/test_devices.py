from dataclasses import asdict

import pytest
import torch

from rankzero.cli.arguments import parse_arguments
from rankzero.distributed import devices
from rankzero.distributed.devices import DeviceAssignment, WorldInfo, assign_device, resolve_world
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.rendezvous.peers import Peer
from rankzero.messages import CannotStart
from running import command_of

FIT = command_of("fit")


@pytest.fixture(autouse=True)
def threads_of_the_environment(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GOMP_SPINCOUNT", "0")


class CoordinatorOfRankZero:
    """Replacement for the coordinator on rank zero, with the given device assignments of all ranks."""

    def __init__(self, launch, assignments=None, hosts=None):
        self.launch, self.assignments = launch, assignments
        self.hosts = hosts or ["a"] * launch.world_size
        self.members = [Peer(rank, rank, 0, launch.world_size, host, rank) for rank, host in enumerate(self.hosts)]

    def run_on_all_ranks(self, work):
        return work()

    def decide(self, value, choose):
        values = [asdict(assignment) for assignment in self.assignments or []] or [value] * self.launch.world_size
        return choose(values)


def resolve(*arguments, launch=None, assignments=None, hosts=None):
    requested = parse_arguments(FIT, arguments).requested_world
    return resolve_world(requested, CoordinatorOfRankZero(launch or Launch(), assignments, hosts))


def launch_of(count, **fields):
    return Launch(launcher="torchrun", world_size=count, local_world_size=count, externally_created=True, **fields)


@pytest.fixture
def gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(devices, "gpu_id", lambda index: f"GPU-{index}")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_gpus_all_processes_run_on_the_cpu_unless_gpus_are_requested():
    assert resolve() == WorldInfo("cpu")
    assert resolve(launch=launch_of(2)) == WorldInfo("cpu", size=2, devices=2)
    with pytest.raises(CannotStart, match="sees 0 GPUs"):
        resolve("--accelerator", "gpu", "--devices", "2")


def test_one_gpu_per_process_uses_nccl_by_default(gpus):
    assignments = [DeviceAssignment("cuda", 0, "GPU-0"), DeviceAssignment("cuda", 1, "GPU-1")]
    assert resolve(launch=launch_of(2), assignments=assignments) == WorldInfo("cuda", size=2, devices=2, backend="nccl")
    assert resolve("--backend", "gloo", launch=launch_of(2), assignments=assignments).backend == "gloo"
    two_machines = launch_of(2)._replace(num_nodes=2, local_world_size=1)  # with the same ids of GPUs
    assert resolve(launch=two_machines, assignments=assignments[:1] * 2, hosts=["a", "b"]).backend == "nccl"


def test_processes_may_share_a_gpu_with_gloo_but_neither_use_nccl_nor_different_accelerators(gpus):
    assignments = [DeviceAssignment("cuda", r % 2, f"GPU-{r % 2}") for r in range(4)]
    world = resolve(launch=launch_of(4), assignments=assignments)
    assert world.backend == "gloo" and world.shares_gpu
    with pytest.raises(CannotStart, match="2 processes share a GPU on a, but NCCL needs one GPU per process") as caught:
        resolve("--backend", "nccl", launch=launch_of(4), assignments=assignments)
    assert "--devices 2" in str(caught.value)
    different = [DeviceAssignment("cuda", 0, "GPU-0"), DeviceAssignment("cpu")]
    with pytest.raises(CannotStart, match="cuda on a, cpu on b"):
        resolve(launch=launch_of(2), assignments=different, hosts=["a", "b"])
    with pytest.raises(CannotStart, match="--backend gloo"):
        resolve("--backend", "nccl", "--accelerator", "cpu")


def test_local_ranks_use_the_visible_or_requested_gpus_in_turn(gpus, monkeypatch):
    def index_of(local_rank, *arguments):
        requested = parse_arguments(FIT, arguments).requested_world
        return assign_device(requested, launch_of(4, local_rank=local_rank)).index

    assert [index_of(rank) for rank in range(4)] == [0, 1, 0, 1]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert index_of(1, "--trainer.devices", "[1,3]") == 3
    with pytest.raises(CannotStart, match="GPU 9"):
        index_of(0, "--trainer.devices", "[1,9]")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # srun --gpus-per-task=1
    assert index_of(3) == 0
