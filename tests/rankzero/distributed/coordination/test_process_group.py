import sys
from datetime import timedelta

import pytest
import torch

from rankzero.distributed.coordination.process_group import destroy_process_group, init_process_group
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
