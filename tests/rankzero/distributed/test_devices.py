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
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@pytest.fixture(autouse=True)
def threads_of_the_environment(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


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
    return resolve_world(
        parse_arguments(FIT, arguments).requested_world, CoordinatorOfRankZero(launch or Launch(), assignments, hosts)
    )


def launch_of(count, **fields):
    return Launch(launcher="torchrun", world_size=count, local_world_size=count, externally_created=True, **fields)


@pytest.fixture
def gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(devices, "gpu_id", lambda index: f"GPU-{index}")


@no_gpu
def test_one_process_without_a_gpu_runs_on_the_cpu():
    assert resolve() == WorldInfo("cpu")


@no_gpu
def test_several_processes_without_gpus_run_on_the_cpu():
    assert resolve(launch=launch_of(2)) == WorldInfo("cpu", size=2, devices=2)


@no_gpu
def test_a_request_for_missing_gpus_is_refused():
    with pytest.raises(CannotStart, match="sees 0 GPUs"):
        resolve("--accelerator", "gpu", "--devices", "2")


def test_one_gpu_per_process_uses_nccl_by_default(gpus):
    assignments = [DeviceAssignment("cuda", 0, "GPU-0"), DeviceAssignment("cuda", 1, "GPU-1")]
    assert resolve(launch=launch_of(2), assignments=assignments) == WorldInfo("cuda", size=2, devices=2, backend="nccl")
    assert resolve("--backend", "gloo", launch=launch_of(2), assignments=assignments).backend == "gloo"


def test_equal_gpu_ids_on_two_machines_are_two_gpus(gpus):
    assignments = [DeviceAssignment("cuda", 0, "GPU-0")] * 2
    launch = launch_of(2)._replace(num_nodes=2, local_world_size=1)
    assert resolve(launch=launch, assignments=assignments, hosts=["a", "b"]).backend == "nccl"


def test_processes_that_share_a_gpu_use_gloo_and_cannot_use_nccl(gpus):
    assignments = [DeviceAssignment("cuda", r % 2, f"GPU-{r % 2}") for r in range(4)]
    world = resolve(launch=launch_of(4), assignments=assignments)
    assert world.backend == "gloo" and world.shares_gpu
    with pytest.raises(CannotStart, match="2 processes share a GPU on a, but NCCL needs one GPU per process") as caught:
        resolve("--backend", "nccl", launch=launch_of(4), assignments=assignments)
    assert "--devices 2" in str(caught.value)


def test_different_accelerators_on_two_machines_are_refused(gpus):
    assignments = [DeviceAssignment("cuda", 0, "GPU-0"), DeviceAssignment("cpu")]
    with pytest.raises(CannotStart, match="cuda on a, cpu on b"):
        resolve(launch=launch_of(2), assignments=assignments, hosts=["a", "b"])


def test_nccl_without_gpus_is_refused():
    with pytest.raises(CannotStart, match="--backend gloo"):
        resolve("--backend", "nccl", "--accelerator", "cpu")


def test_local_ranks_use_the_gpus_in_turn(gpus):
    requested = parse_arguments(FIT, []).requested_world
    assert [assign_device(requested, launch_of(4, local_rank=rank)).index for rank in range(4)] == [0, 1, 0, 1]


def test_a_process_that_sees_only_one_gpu_uses_index_0(gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # srun --gpus-per-task=1
    assert assign_device(parse_arguments(FIT, []).requested_world, launch_of(4, local_rank=3)).index == 0


def test_requested_gpu_indices_are_used_if_they_exist(monkeypatch, gpus):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    requested = parse_arguments(FIT, ["--trainer.devices", "[1,3]"]).requested_world
    assert assign_device(requested, launch_of(2, local_rank=1)).index == 3
    with pytest.raises(CannotStart, match="GPU 9"):
        assign_device(parse_arguments(FIT, ["--trainer.devices", "[1,9]"]).requested_world, launch_of(2))
