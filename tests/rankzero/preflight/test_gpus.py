import json
import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from rankzero.preflight import gpus, network
from rankzero.preflight.check import OK, SKIPPED, WARN
from rankzero.preflight.gpus import Link, check_gpus, gather_in_time, infiniband_gbps, nvlink_gbps, query_gpus
from rankzero.preflight.network import check_collectives
from running import world_of

CUDA = torch.device("cuda", 1)

ROWS = """GPU-a, 612, 0, 0x0000000000000004
GPU-b, 40960, 2, 0x0000000000000088
GPU-c, [N/A], [N/A], 0x0000000000000001
"""
"""Output of nvidia-smi: used memory in MiB, uncorrectable errors, reasons of a low clock."""

NVLINK = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-a)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-b)
\t Link 0: 26.562 GB/s
\t Link 1: <inactive>
"""


class OneCoordinator:
    """Replacement for the coordinator of rank zero, with the values of the other ranks."""

    def __init__(self, others=(), hosts=("n1",)):
        self.world = SimpleNamespace(rank=0, local_rank=0, size=len(hosts), devices=1, nodes=1, hosts=hosts)
        self.others = others

    def decide(self, own, choose, seconds=None):
        return choose([own, *self.others])

    def broadcast_object(self, value):
        return json.loads(json.dumps(value))


@pytest.fixture
def smi(programs, monkeypatch):
    """Makes this process rank zero on GPU-a, and returns a function that adds nvidia-smi."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="a"))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 300 << 20)

    def add(rows=ROWS, links="", fields="clocks_event_reasons"):
        script = f"""
case "$*" in
    *{fields}.active*) printf '{rows}' ;;
    "nvlink --status") printf '{links}' ;;
    *) echo 'Field is not a valid field to query.'; exit 2 ;;
esac
"""
        programs(**{"nvidia-smi": script})

    return add


def on_gpu(uuid, reserved=0):
    return {"uuid": uuid, "reserved": reserved}


def test_a_gpu_without_faults_is_ok_whatever_names_nvidia_smi_has(smi, calls):
    smi(fields="clocks_throttle_reasons")
    check, link = check_gpus(OneCoordinator([on_gpu("c")], ["n1", "n1"]), world_of("cuda", size=2, devices=2))
    assert check.status == OK and check.summary.startswith("2 GPUs without") and link is None, check
    assert len(calls("nvidia-smi")) == 3 and all("-l" not in call.split() for call in calls("nvidia-smi"))


def test_errors_slowdowns_and_foreign_processes_of_a_gpu_are_named_once(smi):
    smi()
    check, _ = check_gpus(OneCoordinator([on_gpu("b"), on_gpu("b")], ["n1"] * 3), world_of("cuda", size=3, devices=3))
    assert check.status == WARN and len(check.advice) == 3
    assert check.details == [
        "the GPU of rank 1 on n1 has had 2 uncorrectable memory errors (ECC)",
        "the GPU of rank 1 on n1 runs at a low clock: hardware slowdown, power brake",
        "other processes use the GPU of rank 1 on n1: 40 GiB of its memory are in use",
    ]
    check, _ = check_gpus(OneCoordinator([on_gpu("b", 40000)], ["n1"] * 2), world_of("cuda", size=2, devices=2))
    assert not any("other processes" in line for line in check.details)


def test_each_rank_that_sees_only_its_own_gpu_asks_nvidia_smi(smi, calls, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    smi(rows="GPU-a, 612, 0, 0x0000000000000004")
    hidden = on_gpu("b") | {"gpus": {"b": ["612", "2", "0x0000000000000004"]}, "nvlink": 0.0, "infiniband": 0.0}
    coordinator = OneCoordinator([hidden], ["n1", "n1"])
    check, _ = check_gpus(coordinator, world_of("cuda", size=2, devices=2))
    assert check.details == ["the GPU of rank 1 on n1 has had 2 uncorrectable memory errors (ECC)"]
    assert len(check.values["gpus"]) == 2
    coordinator.world.local_rank, count = 1, len(calls("nvidia-smi"))
    check_gpus(coordinator, world_of("cuda", size=2, devices=2))
    assert len(calls("nvidia-smi")) > count


def test_without_a_gpu_or_nvidia_smi_the_check_is_skipped(programs, smi):
    assert check_gpus(OneCoordinator(), world_of("cpu"))[0].status == SKIPPED
    check, _ = check_gpus(OneCoordinator(), world_of("cuda"))
    assert check.status == SKIPPED and "nvidia-smi on n1 does not show" in check.summary
    assert query_gpus() == {} and nvlink_gbps() == 0


def test_the_expected_link_is_nvlink_on_one_host_and_the_slowest_infiniband_on_several(smi, tmp_path, monkeypatch):
    smi(links=NVLINK)
    assert nvlink_gbps() == pytest.approx(425, abs=0.1)
    monkeypatch.setattr(gpus, "INFINIBAND", tmp_path)
    assert infiniband_gbps() == 0
    for name, state, rate in (("mlx5_0", "4: ACTIVE", "400 Gb/sec (4X NDR)"), ("mlx5_1", "1: DOWN", "800 Gb/sec")):
        (tmp_path / name / "ports/1").mkdir(parents=True)
        (tmp_path / name / "ports/1/state").write_text(state)
        (tmp_path / name / "ports/1/rate").write_text(rate)
    assert infiniband_gbps() == 400
    one = {"size": 2, "devices": 2, "backend": "nccl"}
    coordinator = OneCoordinator([on_gpu("b")], ["n1", "n1"])
    _, link = check_gpus(coordinator, world_of("cuda", **one))
    assert link.name == "NVLink of 425 Gbit/s" and link.least_gbps == pytest.approx(53, abs=0.2)
    assert check_gpus(coordinator, world_of("cuda", **{**one, "backend": "gloo"}))[1] is None
    other = on_gpu("b") | {"gpus": {}, "nvlink": 0.0, "infiniband": 200.0}
    _, link = check_gpus(OneCoordinator([other], ["n1", "n2"]), world_of("cuda", **one, nodes=2))
    assert link == Link("InfiniBand or RoCE of 200 Gbit/s", 50.0)


@pytest.mark.parametrize(("least", "status"), [(40.0, OK), (60.0, WARN)])
def test_an_all_reduce_that_is_much_slower_than_the_link_is_a_warning(monkeypatch, least, status):
    row = {"bytes": 1 << 28, "seconds": 0.04, "algorithm_gbps": 50.0, "bus_gbps": 50.0}
    monkeypatch.setattr(network, "_check_values", lambda *_: True)
    monkeypatch.setattr(network, "_measure_all_reduce", lambda *_: [row])
    link = Link("NVLink of 425 Gbit/s", least)
    check = check_collectives(OneCoordinator(), torch.device("cpu"), 1.0, 0.5, None, "MLP", link)
    assert check.status == status
    assert any("reaches 50 Gbit/s, but the hosts have NVLink" in line for line in check.advice) == (status == WARN)


def test_results_and_errors_of_nccl_are_those_of_the_work_or_that_it_never_returns(monkeypatch):
    devices, never = [], threading.Event()
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    results, errors = gather_in_time(OneCoordinator(), never.wait, CUDA, 0.05)
    never.set()
    assert results == [None] and errors == {0: "TimeoutError: NCCL did not finish within 0.05 s"}
    assert devices == [CUDA]
    fail = Mock(side_effect=dist.DistBackendError("NCCL error: remote process exited"))
    _, errors = gather_in_time(OneCoordinator(), fail, CUDA, 60)
    assert errors == {0: "DistBackendError: NCCL error: remote process exited"}
    assert gather_in_time(OneCoordinator(), lambda: 7, CUDA, 60) == ([7], {})


def test_a_collective_of_nccl_is_waited_for_without_its_pauses_and_raises_its_error(monkeypatch):
    work = Mock(**{"is_completed.side_effect": [False, False, True]})
    network._finish(work)
    assert (work.is_completed.call_count, work.wait.call_count) == (3, 1)
    monkeypatch.setattr(network, "MAX_SECONDS", 0.0)
    stuck = Mock(**{"is_completed.return_value": False})
    network._finish(stuck)  # `wait` has the time limit of the process group
    assert stuck.wait.call_count == 1
