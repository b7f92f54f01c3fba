import pytest
import torch

from project.command_line import read_flags
from project.environments.detect import Launch
from project.errors import RequestError
from project.world import World, resolve_world
from running import command_of

FIT = command_of("fit")
TORCHRUN = Launch(launcher="torchrun", evidence="TORCHELASTIC_RUN_ID=x", world_size=4, num_nodes=2, created=True)
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def resolve(*arguments, launch=None):
    return resolve_world(read_flags(FIT, arguments), launch or Launch())


@no_gpu
def test_one_process_on_the_cpu():
    assert resolve() == World("cpu", devices=1, nodes=1, backend="gloo")


@no_gpu
def test_the_launchers_world_is_taken_given_or_not():
    world = World("cpu", devices=2, nodes=2, backend="gloo")
    assert resolve(launch=TORCHRUN) == world == resolve("--nodes", "2", "--devices", "2", launch=TORCHRUN)
    assert world.size == 4


@pytest.mark.parametrize("arguments", [("--devices", "3"), ("--nodes", "1"), ("--trainer.devices", "4")])
def test_other_numbers_than_the_launchers(arguments):
    with pytest.raises(RequestError, match="torchrun started 2 x 2 processes"):
        resolve("--accelerator", "cpu", *arguments, launch=TORCHRUN)


def test_two_nodes_without_a_launcher():
    with pytest.raises(RequestError, match="srun python launch/fit.py --nodes 2"):
        resolve("--nodes", "2", "--accelerator", "cpu")


@no_gpu
def test_gpus_that_are_not_there():
    with pytest.raises(RequestError, match="sees 0 GPUs"):
        resolve("--accelerator", "gpu", "--devices", "2")


def test_more_gpus_than_there_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve().devices == 2 and resolve().backend == "nccl"
    with pytest.raises(RequestError, match=r"found  2 GPUs.*\n.*--devices 2"):
        resolve("--devices", "3")
    assert resolve("--devices", "3", "--accelerator", "cpu").backend == "gloo"


def test_gpus_by_number(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    world = resolve("--trainer.devices", "[1,3]")
    assert (world.devices, world.indices) == (2, (1, 3))


def test_uneven_tasks_a_node():
    with pytest.raises(RequestError, match="not as many on each node"):
        resolve(launch=Launch(launcher="slurm", world_size=3, num_nodes=2, created=True))


def test_nccl_without_gpus():
    with pytest.raises(RequestError, match="--backend gloo"):
        resolve("--backend", "nccl", "--accelerator", "cpu")
