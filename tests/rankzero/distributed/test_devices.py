from dataclasses import asdict
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from rankzero import Trainer
from rankzero.cli.arguments import parse_arguments
from rankzero.commands import evaluation, prediction
from rankzero.commands.preflight import preflight
from rankzero.distributed import devices
from rankzero.distributed.devices import Device, assign_device, resolve_world
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.process import system
from rankzero.distributed.world import Peer, World
from rankzero.messages import CannotStart
from running import command_of, fit_in_process, refusal_of

FIT = command_of("fit")


@pytest.fixture(autouse=True)
def threads_of_the_environment(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GOMP_SPINCOUNT", "0")


class CoordinatorOfRankZero:
    """Replacement for the coordinator on rank zero, with the given device assignments of all ranks."""

    def __init__(self, launch, assignments=None, hosts=None):
        hosts = hosts or ["a"] * launch.world_size
        peers = {rank: Peer(rank, rank, 0, launch.world_size, host, rank) for rank, host in enumerate(hosts)}
        self.world, self.assignments = World(launch, peers), assignments

    def run_on_all_ranks(self, work):
        return work()

    def decide(self, value, choose):
        return choose([asdict(device) for device in self.assignments or []] or [value] * self.world.size)


def resolve(*arguments, launch=None, assignments=None, hosts=None):
    requested = parse_arguments(FIT, arguments).requested_world
    return resolve_world(requested, CoordinatorOfRankZero(launch or Launch(), assignments, hosts))


def launch_of(count, **fields):
    return Launch(launcher="torchrun", world_size=count, local_world_size=count, externally_created=True, **fields)


@pytest.fixture
def host(monkeypatch):
    """Returns a function that makes this process one of a host with the given GPUs, as `GPU` of each index."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)

    def become(gpus):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**gpus[index]._asdict()))

    return become


class GPU(NamedTuple):
    """What torch reports of a GPU."""

    uuid: str
    pci_bus_id: int
    pci_domain_id: int = 0
    pci_device_id: int = 0


def whole(*numbers):
    return [GPU(f"gpu{number}", number) for number in numbers]


def instances(*numbers):
    """Instances (MIG) of one GPU."""
    return [GPU(f"mig{number}", 7) for number in numbers]


def resolve_on(host, hosts, *arguments, each_sees_its_own=False):
    """Returns the device index of each rank and the world of rank zero, for hosts as name -> (processes, GPUs)."""
    names = [name for name, (count, _) in hosts.items() for _ in range(count)]
    world = Launch(launcher="torchrun", world_size=len(names), num_nodes=len(hosts), externally_created=True)
    assignments = []
    for count, gpus in hosts.values():
        for local_rank in range(count):
            host(gpus[local_rank : local_rank + 1] if each_sees_its_own else gpus)
            launch = world._replace(local_rank=local_rank, local_world_size=count)
            assignments.append(assign_device(parse_arguments(FIT, arguments).requested_world, launch))
    first = next(iter(hosts.values()))
    host(first[1])
    launch = world._replace(rank=0, local_rank=0, local_world_size=first[0])
    resolved = resolve(*arguments, launch=launch, assignments=assignments, hosts=names)
    return [device.index for device in assignments], resolved


TWO = {"n1": (2, whole(0, 1)), "n2": (2, whole(0, 1))}
LOST = {"n1": (2, whole(0, 1)), "n2": (2, whole(0))}
MIG = {"n1": (2, instances(1, 2))}


@pytest.mark.parametrize(
    ("hosts", "arguments", "expected"),
    [
        ({"n1": (2, whole(0, 1))}, (), ("nccl", False, [0, 1])),
        ({"n1": (2, whole(0, 1, 2, 3))}, ("--trainer.devices", "[1,3]"), ("nccl", False, [1, 3])),
        (TWO, (), ("nccl", False, [0, 1, 0, 1])),
        (TWO, ("--backend", "gloo"), ("gloo", False, [0, 1, 0, 1])),
        ({"n1": (4, whole(0, 1))}, (), ("gloo", True, [0, 1, 0, 1])),
        ({"n1": (4, whole(0, 1))}, ("--backend", "nccl"), "2 processes share a GPU on n1 (4 processes, 2 GPUs)"),
        (LOST, (), "2 processes share a GPU on n2 (2 processes, 1 GPU)"),
        (LOST, ("--backend", "nccl"), "--devices 1, or start the run without n2, or --backend gloo"),
        (LOST, ("--backend", "gloo"), ("gloo", True, [0, 1, 0, 0])),
        ({"n1": (2, whole(0, 1)), "n2": (1, whole(0))}, (), ("nccl", False, [0, 1, 0])),
        (MIG, (), ("gloo", False, [0, 1])),
        (MIG, ("--backend", "nccl"), "2 processes share a GPU on n1 as MIG instances (2 processes, 1 GPU)"),
        ({**MIG, "n2": MIG["n1"]}, (), "or NCCL_MULTI_RANK_GPU_ENABLE=1 with NCCL 2.30 or newer, or --backend gloo"),
        ({"n1": (2, [*instances(1), *whole(0)])}, (), ("nccl", False, [0, 1])),
        ({"n1": (2, whole(0, 1))}, ("--trainer.devices", "[0,9]"), "GPU 9"),
    ],
)
def test_table_of_hosts_and_gpus(host, hosts, arguments, expected):
    if isinstance(expected, str):
        assert expected in str(refusal_of(resolve_on, host, hosts, *arguments))
    else:
        indices, world = resolve_on(host, hosts, *arguments)
        assert (world.backend, world.shares_gpu, indices) == expected


@pytest.mark.parametrize(("version", "backend"), [((2, 29, 7), "gloo"), ((2, 30, 1), "nccl")])
@pytest.mark.parametrize("hosts", [MIG, {"n1": (2, whole(0))}])
def test_nccl_shares_a_gpu_from_2_30_on_if_a_variable_allows_it(host, monkeypatch, hosts, version, backend):
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    assert resolve_on(host, hosts)[1].backend == "gloo"
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert resolve_on(host, hosts)[1].backend == backend


def test_a_rank_that_sees_only_its_own_gpu_uses_index_0(host):
    indices, world = resolve_on(host, TWO, each_sees_its_own=True)
    assert indices == [0, 0, 0, 0] and world.backend == "nccl"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_gpus_all_processes_run_on_the_cpu_unless_gpus_are_requested():
    for world in (resolve(), resolve(launch=launch_of(2))):
        assert (world.accelerator, world.backend, world.index, world.shares_gpu) == ("cpu", "gloo", 0, False)
    assert "sees 0 GPUs: " in refusal_of(resolve, "--accelerator", "gpu", "--devices", "2").found
    assert "--backend gloo" in refusal_of(resolve, "--backend", "nccl", "--accelerator", "cpu").instead


def test_different_accelerators_are_refused():
    with pytest.raises(CannotStart, match="cuda on a, cpu on b"):
        resolve(launch=launch_of(2), assignments=[Device("cuda", 0, "GPU-0"), Device("cpu")], hosts=["a", "b"])


@pytest.mark.parametrize(
    ("error", "listed", "usable", "advice"),
    [
        (AssertionError("Invalid device id"), 8, 7, "--devices 7"),
        (torch.cuda.DeferredCudaCallError("CUDA call failed lazily\n\nat:"), 8, 8, "repair the driver"),
        (RuntimeError("Error 802: system not yet initialized\nCompile with"), 8, 8, "--accelerator cpu"),
        (RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"), 8, 8, "free the GPU"),
    ],
)
def test_a_gpu_that_cuda_cannot_use_is_a_message(monkeypatch, error, listed, usable, advice):
    counts = [listed]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: counts[-1])

    def fail(index):
        counts.append(usable)  # once CUDA is initialized, torch counts its devices and not those of the driver
        raise error

    monkeypatch.setattr(torch.cuda, "set_device", fail)
    text = str(refusal_of(assign_device, parse_arguments(FIT, ()).requested_world, launch_of(8, local_rank=7)))
    assert f"lists {listed} GPUs" in text and f"{str(error).splitlines()[0]}\n" in text and advice in text


@pytest.mark.parametrize("has_gpus", [True, False])
@pytest.mark.parametrize("is_hidden", [True, False])
def test_a_run_on_the_cpu_of_a_host_with_gpus_says_why(tmp_path, monkeypatch, capsys, has_gpus, is_hidden):
    monkeypatch.setattr(devices, "NVIDIA_GPUS", tmp_path)
    monkeypatch.setattr(devices.shutil, "which", lambda program: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "" if is_hidden else "0")
    if has_gpus:
        (tmp_path / "0000:3b:00.0").mkdir()

    def fail():
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "init", fail)
    assert resolve().accelerator == "cpu"
    printed = capsys.readouterr().err
    assert ("1 NVIDIA GPU of " in printed and "Torch not compiled with CUDA" in printed) == (has_gpus and not is_hidden)
    assert bool(printed) == (has_gpus and not is_hidden)
    resolve("--accelerator", "cpu")
    resolve(launch=launch_of(2, rank=1))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("near", "allowed", "bound"),
    [
        (("0-3", "4-7"), range(8), {4, 5, 6, 7}),  # one GPU on each of two sockets
        (("0-3", "0-3"), range(8), None),  # both on one socket: the ranks need the cores of the other one too
        (("0-7", "0-7"), range(8), set(range(8))),
        (("0-3", "4-7"), (4, 5), None),  # the launcher has bound this rank
        (("", ""), range(8), None),  # a virtual machine
    ],
)
def test_ranks_are_bound_to_the_cores_next_to_their_gpu(host, tmp_path, monkeypatch, near, allowed, bound):
    monkeypatch.setattr(system, "PCI_DEVICES", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(allowed))
    bindings = []
    monkeypatch.setattr("os.sched_setaffinity", lambda process, cpus: bindings.append(set(cpus)))
    for number, cpus in enumerate(near):
        (tmp_path / f"0000:0{number}:00.0").mkdir()
        (tmp_path / f"0000:0{number}:00.0/local_cpulist").write_text(f"{cpus}\n")
    coordinator = CoordinatorOfRankZero(launch_of(2, local_rank=1, rank=1, num_nodes=1))
    peers = coordinator.world.peers
    peers.update((rank, peer._replace(cores="0-7")) for rank, peer in list(peers.items()))
    host(whole(0, 1))
    requested = parse_arguments(FIT, ()).requested_world
    coordinator.assignments = [assign_device(requested, launch_of(2, local_rank=rank)) for rank in (0, 1)]
    resolve_world(requested, coordinator)
    assert bindings == ([bound] if bound else [])


class FirstCall(Exception):  # noqa: N818
    """Ends a command at the first call that selects a GPU."""


def start_command(name):
    world = World()
    arguments = ("--model", "MLP", "--data", "Toy", "--devices", "1")
    if name == "script":
        Trainer(logger=False)
    elif name == "fit":
        fit_in_process(*arguments)
    elif name == "preflight":
        preflight(parse_arguments(command_of(name), arguments), world)
    else:
        work = {"evaluate": evaluation.evaluate, "predict": prediction.predict}[name]
        work(parse_arguments(command_of(name), ()), world)


@pytest.mark.parametrize("name", ["fit", "preflight", "evaluate", "predict", "script"])
def test_each_command_selects_its_gpu_before_it_uses_one(script_folder, monkeypatch, name):
    calls = []
    monkeypatch.setattr(evaluation, "find_checkpoint", lambda flags: None)

    def record(function):
        def call(*arguments, **keywords):
            calls.append((function, arguments))
            raise FirstCall

        return call

    for function in set(torch.cuda.__all__) - {"is_available"}:
        if callable(getattr(torch.cuda, function)) and function.islower():
            monkeypatch.setattr(torch.cuda, function, record(function))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(FirstCall):
        start_command(name)
    assert calls == [("set_device", (0,))]
