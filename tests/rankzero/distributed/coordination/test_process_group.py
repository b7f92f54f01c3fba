import io
import json
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from rankzero.distributed.coordination import process_group
from rankzero.distributed.coordination.process_group import broadcast_file, collective_in_flight, destroy_process_group
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.monitoring.monitor import InFlight
from rankzero.distributed.monitoring.stacks import main_thread_frames, waiting_function
from rankzero.distributed.timers import TIMERS
from rankzero.distributed.world import World
from rankzero.messages import RequestError


@pytest.fixture(params=[timedelta(seconds=5), None], ids=["timeout", "no timeout"])
def group(request, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", print)
    process_group.init_process_group(torch.distributed.HashStore(), World(), "gloo", torch.device("cpu"), request.param)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("after_error", [False, True])
def test_a_gloo_group_has_the_values_of_the_launch_keeps_the_exception_hook_and_is_destroyed(group, after_error):
    assert (torch.distributed.get_rank(), torch.distributed.get_world_size()) == (0, 1)
    assert torch.distributed.get_backend() == "gloo" and sys.excepthook is print
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
    with pytest.raises(ZeroDivisionError), process_group.raising_nccl_errors():
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
    monkeypatch.setattr(TIMERS, "slow_poll", 1000.0)
    monkeypatch.setattr(process_group.time, "sleep", sleep)
    process_group.wait_for_gloo_threads()
    assert len(waits) == 3
    (tmp_path / "2" / "stat").write_text("8 (pt_gloo_runloop) R 1")
    monkeypatch.setattr(TIMERS, "slow_poll", 0.0)
    process_group.wait_for_gloo_threads()
    assert len(waits) <= 4


@pytest.mark.skipif(not process_group.THREADS.exists(), reason="reads the threads of a process from /proc")
def test_threads_of_gloo_are_known_by_their_name(group):
    torch.distributed.all_reduce(torch.ones(1))  # by a thread that has named itself before
    names = [(task / "comm").read_text() for task in process_group.THREADS.iterdir()]
    assert any(name.startswith("pt_gloo_runloop") for name in names)


GPU = torch.device("cuda", 3)


def dump(*entries):
    """Returns a dump as `FlightRecorder.hpp` and `FlightRecorderHook.hpp` of torch 2.15.0 write it."""
    named = [
        {"profiling_name": name, "state": state, "retired": retired, "collective_seq_id": 40 + index}
        | {"input_sizes": [[5, 200], [3]], "is_p2p": "send" in name}
        for index, (name, state, retired) in enumerate(entries)
    ]
    return json.dumps({"version": "2.10"} | ({"entries": named} if named else {})).encode()


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
MESSAGE = "nccl:send 0->1", "scheduled", False


def test_the_monitors_thread_reads_the_record_with_this_ranks_gpu_as_the_current_device(recorder):
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(collective_in_flight, "nccl", GPU).result() == InFlight()
    assert recorder.calls == [GPU, "nccl", "fr"]


def test_the_oldest_collective_that_is_not_complete_is_in_flight(recorder):
    for entries, expected in (
        ([("nccl:broadcast", "started", True), BEGUN, QUEUED], InFlight(41, "all_reduce of 1,003 values")),
        ([QUEUED, QUEUED], InFlight(40, awaits_gpu=True)),  # earlier work of the GPU
        ([MESSAGE], InFlight()),  # of a batch that NCCL never completes
        ([MESSAGE, BEGUN], InFlight(41, "all_reduce of 1,003 values")),
    ):
        recorder.nccl = dump(*entries)
        assert collective_in_flight("nccl", GPU) == expected


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


@pytest.fixture
def variables(monkeypatch):
    """The environment variables of this process, in a copy without those of NCCL and of torchrun."""
    prefixes = ("NCCL_", "TORCH_NCCL_", "TORCHELASTIC_")
    values = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    monkeypatch.setattr(process_group.os, "environ", values)
    return values


@pytest.mark.parametrize("user_set", [{}, {"NCCL_DEBUG": "INFO"}, {"NCCL_DEBUG_FILE": "/tmp/nccl"}])
def test_nccl_writes_warnings_to_memory_unless_the_user_has_set_its_variables(monkeypatch, variables, user_set):
    """As with NCCL 2.30.7, which opens the file when it is first used."""
    found = []

    def init(backend, **arguments):
        found.append({name: variables.get(name) for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE")})
        if not user_set:
            Path(variables["NCCL_DEBUG_FILE"]).write_text("n1:7:7 [0] NCCL WARN no socket interface found\n")

    monkeypatch.setattr(torch.distributed, "init_process_group", init)
    monkeypatch.setattr(process_group, "_nccl_log", [])
    variables |= user_set
    process_group.init_process_group(None, World(), "nccl", torch.device("cuda", 0), None)
    assert {name: variables[name] for name in variables if name.startswith("NCCL_")} == user_set
    if user_set:
        assert found == [{"NCCL_DEBUG": None, "NCCL_DEBUG_FILE": None} | user_set]
    else:
        assert found[0]["NCCL_DEBUG"] == "WARN"
    expected = "" if user_set else "n1:7:7 [0] NCCL WARN no socket interface found\n"
    assert [process_group.new_warnings_of_nccl(), process_group.new_warnings_of_nccl()] == [expected, ""]
    assert variables["TORCH_NCCL_ENABLE_TIMING"] == "1"
    for descriptor in process_group._nccl_log:
        os.close(descriptor)


HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@pytest.mark.parametrize(
    ("before", "handling"),
    [
        ({}, "0"),
        ({HANDLING: "1", "TORCHELASTIC_RUN_ID": "x"}, "0"),
        ({HANDLING: "1"}, "1"),
        ({HANDLING: "3", "TORCHELASTIC_RUN_ID": "x"}, "3"),
        ({"NCCL_ASYNC_ERROR_HANDLING": "2"}, None),
    ],
)
def test_torchs_watchdog_ends_a_run_only_if_the_user_has_requested_it(variables, before, handling):
    """torchrun sets the variable to 1 in each of its processes."""
    variables |= before
    process_group.disable_watchdog_of_nccl()
    assert variables.get(HANDLING) == handling
    assert variables.get("TORCH_NCCL_RETHROW_CUDA_ERRORS") == ("0" if handling == "0" else None)


def test_a_rank_that_creates_the_process_group_waits_for_the_other_ranks():
    found, is_over = [], threading.Event()

    def watch():
        while not is_over.wait(0.01) and not any(found):
            found.append(waiting_function(main_thread_frames()))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        with pytest.raises(RuntimeError):
            store, world = torch.distributed.HashStore(), World(Launch(world_size=2))
            process_group.init_process_group(store, world, "gloo", torch.device("cpu"), timedelta(seconds=0.5))
    finally:
        is_over.set()
        thread.join()
    assert found[-1] == "the connection of the process group"


CHUNK, FITS, DOES_NOT_FIT = 100, 1, 10**15
"""Bytes that are sent at once, and numbers of local ranks for which a file does or does not fit into memory."""


def receive(coordinator, files):
    """Returns, for each file, the content that one rank receives, the value, and how often it has opened the file."""
    received = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_group, "CHUNK_BYTES", CHUNK)
        for path, local_ranks in files:
            open_file = Mock(side_effect=lambda in_memory, path=path: (path.open("rb"), "a value"))
            file, value = broadcast_file(open_file, torch.device("cpu"), local_ranks)
            with file:
                received.append((file.read(), value, open_file.call_count))
    return received


def test_rank_zero_reads_a_file_for_all_ranks_unless_it_does_not_fit_into_memory(on_ranks, tmp_path):
    contents = [os.urandom(size) for size in (0, 1, 10 * CHUNK, 10 * CHUNK + 1)]
    for number, content in enumerate(contents):
        (tmp_path / str(number)).write_bytes(content)
    files = [*((tmp_path / str(number), FITS) for number in range(4)), (tmp_path / "3", DOES_NOT_FIT)]
    for rank, received in enumerate(on_ranks(receive, 3, files)):
        assert received[:4] == [(content, "a value", int(rank == 0)) for content in contents]
        assert received[4] == (contents[3], "a value", 1)


class Truncated(io.BufferedReader):
    """A file of five bytes that another process has truncated after its size of ten bytes was read."""

    def __init__(self):
        super().__init__(io.BytesIO(bytes(5)))

    def seek(self, offset, whence=io.SEEK_SET):
        return 10 if whence == io.SEEK_END else super().seek(offset, whence)


def receive_errors_and_tensors(coordinator, path):
    """Returns the errors for a truncated and a refused file, and the sum in a file that torch loads."""
    errors, refuse = [], Mock(side_effect=RequestError("the checkpoint x", "truncated", "another one"))
    for open_file in (lambda in_memory: (Truncated(), None), refuse):
        with pytest.raises((OSError, RequestError)) as error:
            broadcast_file(open_file, torch.device("cpu"), FITS)
        errors.append(error.value.args)
    file, _ = broadcast_file(lambda in_memory: (io.BytesIO(path.read_bytes()), None), torch.device("cpu"), FITS)
    return errors, torch.load(file, weights_only=True)["x"].sum().item()


def test_an_error_of_rank_zero_is_raised_on_all_ranks_and_torch_loads_a_received_file(on_ranks, tmp_path):
    torch.save({"x": torch.arange(1000.0)}, tmp_path / "file")
    errors = [("only 5 of 10 bytes could be read",), ("the checkpoint x", "truncated", "another one")]
    assert on_ranks(receive_errors_and_tensors, 2, tmp_path / "file") == [(errors, 499500.0)] * 2
