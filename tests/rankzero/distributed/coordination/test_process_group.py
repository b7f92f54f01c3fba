import sys
from datetime import timedelta

import pytest
import torch

from rankzero.distributed.coordination import process_group
from rankzero.distributed.coordination.process_group import (
    destroy_process_group,
    init_process_group,
    wait_for_gloo_threads,
)
from rankzero.distributed.environments.launch import Launch


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


def test_an_nccl_group_is_kept_after_an_error(group, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "nccl")
    assert not destroy_process_group(after_error=True)
    assert torch.distributed.is_initialized()


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
