import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from rankzero.distributed.coordination import process_group
from rankzero.distributed.coordination.process_group import (
    collective_in_flight,
    destroy_process_group,
    init_process_group,
    raising_nccl_errors,
    wait_for_gloo_threads,
)
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.monitoring.heartbeat import InFlight


@pytest.fixture(params=[timedelta(seconds=5), None], ids=["timeout", "no timeout"])
def group(request, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", print)
    init_process_group(torch.distributed.HashStore(), Launch(), "gloo", torch.device("cpu"), request.param)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_the_group_has_the_values_of_the_launch_and_the_exception_hook_is_unchanged(group):
    assert (torch.distributed.get_rank(), torch.distributed.get_world_size()) == (0, 1)
    assert torch.distributed.get_backend() == "gloo" and sys.excepthook is print


@pytest.mark.parametrize("after_error", [False, True])
def test_a_gloo_group_is_destroyed(group, after_error):
    assert destroy_process_group(after_error)
    assert not torch.distributed.is_initialized()
    assert destroy_process_group(after_error)  # without a group


def test_an_nccl_group_is_kept_after_an_error_also_at_the_end(group, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "nccl")
    assert not destroy_process_group(after_error=True)
    assert not destroy_process_group(after_error=False)
    assert torch.distributed.is_initialized()


@pytest.mark.parametrize("setting", [None, "0"])
def test_torch_reads_that_nccl_errors_are_raised_only_while_the_group_is_created(monkeypatch, setting):
    name = "TORCH_NCCL_BLOCKING_WAIT"
    monkeypatch.delenv(name, raising=False)
    if setting:
        monkeypatch.setenv(name, setting)
    with pytest.raises(ZeroDivisionError), raising_nccl_errors():
        assert os.environ[name] == "1"
        1 / 0  # noqa: B018
    assert os.environ.get(name) == setting


def test_a_fork_waits_for_running_threads_of_gloo(monkeypatch, tmp_path):
    states = {"1": "7 (python) R 1", "2": "8 (pt_gloo_runloop) R 1", "3": "9 (pt_gloo_runloop) S 1"}
    for name, text in states.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "stat").write_text(text)
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            (tmp_path / "2" / "stat").write_text("8 (pt_gloo_runloop) S 1")

    monkeypatch.setattr(process_group, "THREADS", tmp_path)
    monkeypatch.setattr(process_group, "THREAD_WAIT_SECONDS", 1000)
    monkeypatch.setattr(process_group.time, "sleep", sleep)
    wait_for_gloo_threads()
    assert len(waits) == 3
    (tmp_path / "2" / "stat").write_text("8 (pt_gloo_runloop) R 1")
    monkeypatch.setattr(process_group, "THREAD_WAIT_SECONDS", 0)
    wait_for_gloo_threads()
    assert len(waits) <= 4


@pytest.mark.skipif(not process_group.THREADS.exists(), reason="reads the threads of a process from /proc")
def test_threads_of_gloo_are_known_by_their_name(group):
    torch.distributed.all_reduce(torch.ones(1))  # by a thread that has named itself before
    names = [(task / "comm").read_text() for task in process_group.THREADS.iterdir()]
    assert any(name.startswith("pt_gloo_runloop") for name in names)


GPU = torch.device("cuda", 3)


def dump(*entries):
    """Returns a dump with the fields that torch 2.15.0 writes for gloo; the names and states of NCCL are constructed.

    They follow `FlightRecorder.hpp` and `FlightRecorderHook.hpp` of torch 2.15.0.
    """
    common = {
        "input_dtypes": ["Float"],
        "is_p2p": False,
        "op_id": 1,
        "p2p_seq_id": 0,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "thread_name": "python",
        "time_discovered_completed_ns": 0,
        "time_discovered_started_ns": 0,
        "timeout_ms": 1800000,
    }
    named = [
        {**common, "profiling_name": name, "state": state, "retired": retired, "collective_seq_id": 40 + index}
        | {"input_sizes": [[5, 200], [3]], "record_id": index}
        for index, (name, state, retired) in enumerate(entries)
    ]
    status = {"0": {"last_completed_collective": "39", "last_enqueued_collective": "41"}}
    return json.dumps({"version": "2.10", "pg_status": status} | ({"entries": named} if named else {})).encode()


@pytest.fixture
def recorder(monkeypatch):
    """Replaces CUDA and torch's flight recorder. The returned object holds dumps, and the calls of CUDA in order."""
    found = SimpleNamespace(nccl=dump(), nccl2=dump(), gloo=dump(), calls=[], is_idle=True)
    module = torch._C._distributed_c10d

    def read(name, onlyActive, backend="nccl"):  # noqa: N803 - torch's name
        assert onlyActive
        found.calls.append(name)
        return getattr(found, backend)

    monkeypatch.setattr(module, "_dump_nccl_trace_json", partial(read, "nccl"))
    monkeypatch.setattr(module, "_dump_fr_trace_json", partial(read, "fr"))
    monkeypatch.setattr(module, "ProcessGroupNCCL2", object, raising=False)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", found.calls.append)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: SimpleNamespace(query=lambda: found.is_idle))
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", None)
    monkeypatch.setenv("TORCH_NCCL_ENABLE_TIMING", "1")
    return found


QUEUED, BEGUN = ("nccl:all_reduce", "scheduled", False), ("nccl:all_reduce", "started", False)


def test_the_monitors_thread_reads_the_record_with_this_ranks_gpu_as_the_current_device(recorder):
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(collective_in_flight, "nccl", GPU).result() == InFlight()
    assert recorder.calls == [GPU, "nccl", "fr"]


def test_a_collective_that_the_gpu_has_begun_waits_for_other_ranks(recorder):
    recorder.nccl = dump(("nccl:broadcast", "started", True), BEGUN, QUEUED)
    assert collective_in_flight("nccl", GPU) == InFlight(41, "all_reduce of 1,003 values")


def test_a_gpu_that_has_not_begun_its_oldest_collective_still_works(recorder):
    recorder.nccl = dump(QUEUED, QUEUED)
    assert collective_in_flight("nccl", GPU) == InFlight(40, awaits_gpu=True)


def test_without_start_times_the_cause_may_be_the_collective_or_a_kernel_before_it(recorder, monkeypatch):
    recorder.nccl2 = dump(("nccl2:all_reduce", "scheduled", False))
    waiting = InFlight(40, "all_reduce of 1,003 values or for a kernel before it")
    assert collective_in_flight("nccl", GPU) == waiting
    recorder.nccl, recorder.nccl2 = dump(QUEUED), dump()
    monkeypatch.setenv("TORCH_NCCL_ENABLE_TIMING", "0")
    assert collective_in_flight("nccl", GPU) == waiting


def test_without_a_collective_the_stream_shows_whether_the_gpu_works(recorder):
    recorder.is_idle = False
    assert collective_in_flight("nccl", GPU) == InFlight(awaits_gpu=True)
    assert collective_in_flight("gloo", torch.device("cpu")) == InFlight()


@pytest.mark.parametrize("captures", [True, False])
def test_the_record_is_not_read_while_a_cuda_graph_is_captured(recorder, monkeypatch, captures):
    recorder.nccl = dump(BEGUN)
    streams = [None]

    @contextmanager
    def use(stream):
        streams.append(stream)
        yield
        streams.pop()

    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", "capture stream")
    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures and streams[-1] == "capture stream")
    assert bool(collective_in_flight("nccl", GPU).number) is not captures
    assert ("nccl" in recorder.calls) is not captures


def test_a_version_of_torch_without_a_record_is_reported(recorder, monkeypatch):
    monkeypatch.delattr(torch._C._distributed_c10d, "_dump_fr_trace_json")
    with pytest.raises(NotImplementedError, match="does not record the collectives of gloo"):
        collective_in_flight("gloo", torch.device("cpu"))
