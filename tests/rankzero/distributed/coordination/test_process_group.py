"""torch's process group: created on a shared store, and destroyed before the process exits."""

import sys
from datetime import timedelta

import pytest
import torch

from rankzero.distributed.coordination.process_group import destroy_process_group, init_process_group
from rankzero.distributed.environments.launch import Launch

CPU = torch.device("cpu")


@pytest.fixture
def group():
    init_process_group(torch.distributed.HashStore(), Launch(), "gloo", CPU, timedelta(seconds=5))
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_the_group_has_the_rank_and_world_size_of_the_launch(group):
    assert (torch.distributed.get_rank(), torch.distributed.get_world_size()) == (0, 1)
    assert torch.distributed.get_backend() == "gloo"


def test_the_exception_hook_is_unchanged(monkeypatch):
    def hook(*error):
        pass

    monkeypatch.setattr(sys, "excepthook", hook)
    init_process_group(torch.distributed.HashStore(), Launch(), "gloo", CPU, None)
    try:
        assert sys.excepthook is hook
    finally:
        destroy_process_group(after_error=False)


@pytest.mark.parametrize("after_error", [False, True])
def test_a_gloo_group_is_destroyed(group, after_error):
    assert destroy_process_group(after_error)
    assert not torch.distributed.is_initialized()
    assert destroy_process_group(after_error)  # without a group


def test_an_nccl_group_is_kept_after_an_error(group, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "nccl")
    assert not destroy_process_group(after_error=True)
    assert torch.distributed.is_initialized()
