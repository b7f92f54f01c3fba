import os

import pytest

from rankzero.distributed import join
from rankzero.distributed.environments.launch import Launch, RequestedWorld


@pytest.mark.parametrize("count", [1, 2])
def test_the_parent_of_local_processes_exits_with_their_exit_code_and_silences_their_sockets(monkeypatch, count):
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "")  # restored after the test
    del os.environ["TORCH_CPP_LOG_LEVEL"]
    started = []

    def record(command, count, launch):
        started.append((count, os.environ["TORCH_CPP_LOG_LEVEL"]))
        return 7

    monkeypatch.setattr(join, "run_processes", record)
    with pytest.raises(SystemExit) as caught:
        join.join_ranks(RequestedWorld(), Launch(), count)
    assert caught.value.code == 7 and started == [(count, "ERROR")]
